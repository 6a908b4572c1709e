"""The jobs of k8s/spark agree with the pipeline's code, its image and the worker's namespace."""

import contextlib
import io
import re
from collections.abc import Iterator

import pytest

from outbox.errors import SettingError
from outbox.program.settings import fields_of
from outbox_pipeline.cli import _parser
from outbox_pipeline.job_settings import ArchiveSettings, AuditSettings, RegisterSettings
from outbox_pipeline.spanner import DEFAULT_RETENTION, TIME_TO_READ
from tests.manifests.rendering import ROOT, SPARK, Object, rendered, the
from tests.manifests.test_dockerfile import instructions, variables

ROLES = ("driver", "executor")

each_job = pytest.mark.parametrize("name", ["archive", "audit", "register"])


def spec(name: str) -> Object:
    return dict(the(rendered(SPARK), "ScheduledSparkApplication", f"outbox-{name}")["spec"])


def settings() -> dict[str, str]:
    return dict(the(rendered(SPARK), "ConfigMap")["data"])


def refusals(words: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Yield why the command or the settings of a job refuse these arguments in an environment."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            options = _parser().parse_args(words)
        options.settings.read(vars(options), environment)
    except SettingError as error:
        yield str(error)
    except SystemExit:
        yield output.getvalue()


@each_job
def test_a_job_takes_its_arguments_and_variables(name: str) -> None:
    """Driver and executors have the same variables, and each of these is a setting."""
    template = spec(name)["template"]
    assert template["arguments"][0] == name
    assert list(refusals(template["arguments"], settings())) == []
    # A setting of one job may mean something else for another one, such as the topic of `register` and `replay`.
    known = [
        {field.variable for field in fields_of(each)} for each in (ArchiveSettings, AuditSettings, RegisterSettings)
    ]
    assert settings().keys() <= set.intersection(*known)
    for role in ROLES:
        [container] = template[role]["template"]["spec"]["containers"]
        assert container["name"] == f"spark-kubernetes-{role}"  # Spark adds a container of this name otherwise
        assert container["envFrom"] == [{"configMapRef": {"name": "outbox-pipeline"}}]


@each_job
def test_a_job_fits_its_image(name: str) -> None:
    """Spark's version, Python, the main file, the user and the writable working directory are those of the image."""
    template, image = spec(name)["template"], variables("pipeline")
    pinned = re.search(r"^pyspark==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert template["sparkVersion"] == pinned[1]
    assert template["sparkConf"]["spark.pyspark.python"] == image["PYSPARK_PYTHON"]
    packages = image["SPARK_HOME"].removesuffix("/pyspark")
    assert template["mainApplicationFile"] == f"local://{packages}/outbox_pipeline/__main__.py"
    for role in ROLES:
        pods = template[role]["template"]
        assert pods["metadata"]["labels"]["tags.datadoghq.com/version"] == template["image"].partition(":")[2]
        context = pods["spec"]["securityContext"]
        assert instructions("pipeline", "USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
        [container] = pods["spec"]["containers"]
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        [folder] = instructions("pipeline", "WORKDIR")  # Spark writes to it
        assert folder in writable


def test_only_the_archive_is_restarted_and_always_in_time() -> None:
    """An archive continues after a failure while Spanner keeps the day; `register` would reject rows again."""
    archive, register = spec("archive"), spec("register")
    minute, hour = map(int, archive["schedule"].split()[:2])
    policy = archive["template"]["restartPolicy"]
    assert (policy["type"], register["template"]["restartPolicy"]["type"]) == ("OnFailure", "Never")
    last = minute * 60 + hour * 3600 + policy["onFailureRetries"] * policy["onFailureRetryInterval"]
    assert last <= (DEFAULT_RETENTION - TIME_TO_READ).total_seconds()
    assert archive["schedule"] != register["schedule"]
    assert archive["concurrencyPolicy"] == register["concurrencyPolicy"] == "Forbid"
