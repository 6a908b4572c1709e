"""The DAG of the page pipeline-deploy.md, with Airflow in an environment of its own, because it fixes many versions."""

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outbox_pipeline import cli
from tests.support.processes import ROOT

pytestmark = [pytest.mark.long("it downloads Airflow, 200 MB"), pytest.mark.timeout(900)]

#: Prints the tasks of the DAG: the command as Airflow renders it, and the tasks that follow.
READ = """
import json, sys
from types import SimpleNamespace

from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.execution_time import macros

bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
[dag] = bag.dags.values()
names = {"ds": "2026-11-21", "ts_nodash": "20261121T002000", "ti": SimpleNamespace(try_number=2), "macros": macros}
environment = dag.get_template_env()
print(json.dumps({
    task.task_id: (task.render_template(task.bash_command, names, environment), list(task.downstream_task_ids))
    for task in dag.tasks
}))
"""


def test_airflow_reads_the_dag_and_the_jobs_accept_its_commands(tmp_path: Path):
    page = (ROOT / "docs/operations/pipeline-deploy.md").read_text(encoding="utf-8")
    [dag] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags/outbox.py").write_text(dag, encoding="utf-8")
    python = tmp_path / "airflow/bin/python"
    uv = [Path(sys.executable).with_name("uv")]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "airflow"], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, "apache-airflow==3.3.*"], check=True)
    variables = os.environ | {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    words = [python, "-c", READ, str(tmp_path / "dags")]
    read = subprocess.run(words, env=variables, check=True, capture_output=True, text=True)
    (archive, after), (audit, last) = json.loads(read.stdout.splitlines()[-1]).values()
    assert (after, last) == (["audit"], [])
    settings = []
    for command in (archive, audit):
        program, *flags = shlex.split(command)
        assert program == "outbox-pipeline"
        given = cli._parser().parse_args(flags)
        settings.append(given.settings.read(vars(given), {}))
    assert [type(each).__name__ for each in settings] == ["ArchiveSettings", "AuditSettings"]
    assert (settings[1].since, settings[1].until) == (
        datetime(2026, 11, 20, tzinfo=UTC),
        datetime(2026, 11, 21, tzinfo=UTC),
    )
