"""The files that users pass to jobs: each row is read with its columns, or the job refuses the files."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from outbox.errors import OutboxError, SettingError
from outbox_pipeline.jobs.register import read
from outbox_pipeline.rows.texts import task_id
from outbox_pipeline.spark.stack_traces import spark_errors
from tests.support.pipeline import Case, read_rows

LINE = b'{"data":"a"}\n'
CSV = b"data\na\n"
TABLE = "{} is a table of Delta Lake, Hudi, Iceberg or Paimon, or was written by a stream. Its files can have"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tasks(spark: SparkSession, path: object, format: str, *key: str) -> list[Any]:
    return read_rows(spark, path, format, topic="orders", key=key)


def reasons(spark: SparkSession, path: object, format: str) -> list[tuple[str | None, str | None]]:
    return sorted((each.reason, each.line) for each in tasks(spark, path, format) if each.reason)


FILES = {
    "delta": ("_delta_log/0.json", "a.parquet", "month=01/b.parquet"),
    "hudi": (".hoodie/p", "month=1/a.parquet"),
    "iceberg": ("metadata/v1.metadata.json", "data/a.parquet"),
    "nested": ("x/y/_delta_log/0.json", "x/y/a.parquet"),
    "hidden": (
        "file/a.jsonl", "file/_a.jsonl", "folder/b.jsonl", "folder/_temporary/0/a.jsonl", "dot/.a.csv", "dot/a.csv",
    ),
    "unfinished": (
        "tmp/a.csv", "tmp/b.csv.tmp", "part/a.csv.part", "chrome/a.csv", "chrome/Unconfirmed 1.crdownload",
        "rsync/a.csv", "rsync/.b.csv.Xk2", "vim/a.csv", "vim/a.csv~",
    ),
    "escaped": ("ordering_key=%E9/a.csv",),
    "empty": ("parquet/a.parquet", "json/a.jsonl", "csv/a.csv"),
    "compressed": ("lz4/a.jsonl.lz4", "a.jsonl.snappy", "a.csv.gz.bz2", "a.jsonl.tar.gz", "a.csv.zip"),
    "marks": ("_SUCCESS", ".crc"),
    "twice": ("Data=a/a.csv",),
    "stream": ("_spark_metadata/0", "a.jsonl"),
    "paimon": ("snapshot/snapshot-1", "bucket-0/a.parquet"),
    "copy": ("a.parquet._COPYING_", "b.parquet"),
    "links": ("b.jsonl",),
}  # fmt: skip


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    write(folder, {f"{kind}/{name}": CSV for kind, names in FILES.items() for name in names})
    (folder / "links/a.jsonl").symlink_to("nowhere")
    (folder / "month").symlink_to(folder / "delta/month=01")
    write(folder / "empty", dict.fromkeys(("parquet/b.parquet", "json/b.jsonl", "csv/b.csv"), b""))
    return folder


@pytest.mark.parametrize(
    ("pattern", "format", "message"),
    [
        ("delta", "parquet", TABLE.format("delta")),
        ("delta/*.parquet", "parquet", TABLE.format("delta")),
        ("delta/month=01", "parquet", TABLE.format("delta")),
        ("*", "parquet", TABLE.format(r"\*")),
        ("iceberg", "parquet", TABLE.format("iceberg")),
        ("iceberg/data/*", "parquet", TABLE.format("iceberg")),
        ("hudi/month=*/", "parquet", TABLE.format("hudi")),
        ("nested", "parquet", TABLE.format("nested")),
        ("stream/*.jsonl", "json", TABLE.format("stream")),
        ("paimon/bucket-*/", "parquet", TABLE.format("paimon")),
        ("month", "parquet", TABLE.format("delta")),
        ("{month,marks}/*", "parquet", TABLE.format("delta")),
        ("links", "json", r"would ignore .*/links/a\.jsonl, because it is a link to nowhere, which does not exist"),
        ("copy", "parquet", r"would ignore .*/a\.parquet\._COPYING_, because .* or is that of an unfinished copy"),
        ("hidden/file", "json", r"would ignore .*/_a\.jsonl, because a name begins with _ or a dot"),
        ("hidden/folder", "json", r"would ignore .*/_temporary/0/a\.jsonl"),
        ("hidden/dot", "csv", r"would ignore .*/\.a\.csv"),
        ("unfinished/tmp", "csv", r"b\.csv\.tmp does not end with the extension of csv\. Another program may still be"),
        ("unfinished/part", "csv", r"a\.csv\.part does not end .* or pass a pattern such as .*/part/\*\.csv"),
        ("unfinished/chrome", "csv", r"Unconfirmed 1\.crdownload does not end with the extension of csv"),
        ("unfinished/vim", "csv", r"a\.csv~ does not end with the extension of csv"),
        ("unfinished/rsync", "csv", r"would ignore .*/\.b\.csv\.Xk2, because a name begins with _ or a dot"),
        ("escaped", "csv", r"A folder of .*/a\.csv has escaped characters that are not UTF-8\. Rename it"),
        ("empty/parquet", "parquet", r"b\.parquet is empty\. Write it again, or delete it if it should have no rows"),
        ("empty/json", "json", r"b\.jsonl is empty\. Write it again"),
        ("empty/csv", "csv", r"b\.csv is empty"),
        ("compressed/lz4/*", "json", r"cannot read .*\.lz4, because of its compression \.lz4\. Compress it once"),
        ("compressed/a.jsonl.snappy", "auto", r"because of its compression \.snappy"),
        ("compressed/a.csv.gz.bz2", "auto", r"because of its compression \.gz\.bz2"),
        ("compressed/a.jsonl.tar.gz", "json", r"because of its compression \.tar\.gz"),
        ("compressed/a.csv.zip", "csv", r"because of its compression \.zip"),
        ("twice", "csv", r"twice: column Data is in the files and in the names of their folders\. Remove it"),
        ("marks", "json", r"contains no file\. Check the path\. Spark ignores names"),
        ("nothing/here", "json", r"contains no file\. Check the path"),
    ],
)
def test_files_that_spark_would_not_read_right_are_refused(
    spark: SparkSession, odd: Path, pattern: str, format: str, message: str
):
    """Otherwise the job would lose or add rows with exit code 0, or end Spark's JVM."""
    with pytest.raises(OutboxError, match=message):
        read(spark, f"{odd}/{pattern}", format)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_row_has_the_columns_of_its_folders(spark: SparkSession, tmp_path: Path, kind: str):
    """Also in subfolders. Programs escape such names as in URLs, which Spark would decode as ASCII."""
    null = "ordering_key=__HIVE_DEFAULT_PARTITION__/"
    folders = {"": None, "x/": None, null: None, "ordering_key=%C3%A9+%20%2F/": "é+ /", "ordering_key=ö%/y/": "ö%"}
    for place in folders:
        (tmp_path / place).mkdir(exist_ok=True, parents=True)
        if kind == "parquet":
            pq.write_table(pa.table({"data": ["a"]}), tmp_path / place / "a.parquet")
        else:
            write(tmp_path / place, {f"a.{kind}": LINE if kind == "jsonl" else CSV})
    cases = {"": [*folders.values()], "ordering_key=ö*": ["ö%"], f"ordering_key=ö%/*/a.{kind}": ["ö%"]}
    for pattern, keys in cases.items():
        found = tasks(spark, f"{tmp_path}/{pattern}", kind.replace("jsonl", "json"))
        assert sorted((each.ordering_key for each in found), key=str) == sorted(keys, key=str), pattern


def test_folders_in_the_path_itself_are_columns_if_the_job_knows_them(spark: SparkSession, tmp_path: Path):
    write(tmp_path / "d.`t=1", {"a.jsonl": LINE})
    assert len(tasks(spark, tmp_path / "d.`t=1", "json")) == 1
    [keyed] = tasks(spark, tmp_path / "d.`t=1", "json", "d.`t")
    assert keyed.task_id == task_id("orders", "1")
    write(tmp_path / "Ordering_Key=A", {"a.jsonl": LINE})
    for path, column in (("d.`t=*", "d.`t"), ("Ordering_Key=A", "Ordering_Key")):
        with pytest.raises(SettingError, match=f"Unknown column '{column}'"):
            tasks(spark, f"{tmp_path}/{path}", "json")


def test_a_line_is_rejected_with_the_columns_of_its_folder(spark: SparkSession, tmp_path: Path):
    write(tmp_path / "ordering_key=A", {"a.jsonl": b'{"data":"a","ordering_key":"B"}\n{bad\n'})
    syntax = "the line is not a JSON object: Expecting value at character 2 (folder ordering_key=A)"
    assert reasons(spark, tmp_path, "json") == [
        ("the line has unknown columns: ordering_key (folder ordering_key=A)", '{"data":"a","ordering_key":"B"}'),
        (syntax, "{bad"),
    ]


def test_the_cause_of_an_unreadable_file_is_named(spark: SparkSession, tmp_path: Path):
    write(tmp_path, {"colon/a:b.jsonl": LINE, "x:y/a.jsonl": LINE})
    gone = write(tmp_path / "gone", {"a.jsonl": LINE, "b.jsonl": LINE})
    assert len(tasks(spark, tmp_path / "x:y", "json")) == 1
    rows = read(spark, str(gone), "json")
    (gone / "b.jsonl").unlink()
    cases = {
        "Rename the file, because Spark cannot read a name with a colon": read(spark, str(tmp_path / "colon"), "json"),
        "The file was deleted or replaced during the job": rows,
    }
    for remedy, found in cases.items():
        with pytest.raises(OutboxError, match=remedy), spark_errors():
            found.collect()
    with pytest.raises(OutboxError, match="a name with a colon"):
        tasks(spark, f"{tmp_path}/colon/*", "json")


def test_a_damaged_or_missing_file_is_an_error_whatever_the_cluster_says(spark: SparkSession, tmp_path: Path):
    """Otherwise its rows would be missing, with exit code 0."""
    other = spark.newSession()
    for kind in ("Corrupt", "Missing"):
        other.conf.set(f"spark.sql.files.ignore{kind}Files", "true")
    write(tmp_path, {"bad/a.jsonl.gz": gzip.compress(LINE * 1000)[:-20], "gone/a.jsonl": LINE, "gone/b.jsonl": LINE})
    found = [read(other, f"{tmp_path}/{folder}", "json") for folder in ("bad", "gone")]
    (tmp_path / "gone/b.jsonl").unlink()
    for rows in found:
        with pytest.raises(OutboxError, match=r"damaged|was deleted"), spark_errors():
            rows.collect()


@pytest.mark.parametrize(("name", "message"), [("delta/*.parquet", "is a table"), ("empty/json/*.jsonl", "is empty")])
def test_received_files_are_checked_the_same_way(case: Case, odd: Path, name: str, message: str):
    with pytest.raises(OutboxError, match=message):
        case.audit(received=f"{odd}/{name}")
