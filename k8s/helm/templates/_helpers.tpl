{{- define "publishworker.name" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}
{{- define "publishworker.named" -}}
{{- $suffix := last . -}}
{{- include "publishworker.name" (first .) | trunc (int (sub 62 (len $suffix))) | trimSuffix "-" }}-{{ $suffix -}}
{{- end }}
{{- define "publishworker.instance" -}}
{{- ternary .Release.Name (include "publishworker.name" .) (eq .Chart.Name "publishworker") -}}
{{- end }}
{{- define "publishworker.tag" -}}
{{- .Values.image.tag | default .Chart.AppVersion -}}
{{- end }}
{{- define "publishworker.given" -}}
{{- range .Values.extraEnv }}{{ .name }} {{ end -}}
{{- end }}
{{- define "publishworker.version" -}}
{{- include "publishworker.tag" . | trunc 63 | trimAll "-_." -}}
{{- end }}
{{- define "publishworker.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
