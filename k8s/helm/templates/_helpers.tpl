{{- define "publishworker.name" -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- ternary .Release.Name $name (contains .Chart.Name .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end }}
{{- define "publishworker.tag" -}}
{{- .Values.image.tag | default .Chart.AppVersion -}}
{{- end }}
{{- define "publishworker.version" -}}
{{- include "publishworker.tag" . | trunc 63 | trimAll "-_." -}}
{{- end }}
