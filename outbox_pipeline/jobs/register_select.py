"""`register --select`: Spark SQL makes the columns of tasks from those of the input, or the row is rejected.

It works on Spark's own trees, because no function of its SQL makes NULL of every error, and its * selects all columns.
"""

import re
from collections.abc import Iterator
from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from outbox.errors import SettingError
from outbox_pipeline.rows.register_rows import FILE, HIDDEN, LINE, OF_REJECTS, WHY
from outbox_pipeline.rows.text_files import null_text
from outbox_pipeline.spark.files import quoted

#: The columns of a row of text with a text that may mean NULL.
NULLS = "(outbox) nulls"
#: Precedes the names of columns that are NULL if they cannot be computed, and otherwise have the value inside.
_TRIED = "(outbox) value "
#: Functions with another value at each attempt, which Spark calls deterministic.
_OF_ATTEMPT = {"CurrentDate", "CurrentTime", "CurrentTimestamp", "LocalTimestamp", "Now"}


def selected(rows: DataFrame, select: str) -> DataFrame:
    """Return the columns that `select` makes of the rows, and HIDDEN.

    Raises SettingError with Spark's own position in `select`, or for a function that makes other tasks at each attempt.
    """
    given = rows.drop(*HIDDEN, NULLS)
    made = _expressions(given, select)
    names = [*made.dataType().fieldNames()]
    values = [made.valExprs().apply(number) for number in range(len(names))]
    tried = [_tried(rows, value).alias(f"{_TRIED}{number}") for number, value in enumerate(values)]
    found = [f.col(f"{_TRIED}{number}") for number in range(len(names))]
    reasons = [f.col(WHY)] if WHY in rows.columns else []
    if NULLS in rows.columns:
        of_columns = (_used(value) for name, value in zip(names, values, strict=True) if name not in OF_REJECTS)
        used = dict.fromkeys(column for columns in of_columns for column in columns)
        reasons += [f.when(f.array_contains(NULLS, column), f.lit(null_text(column))) for column in used]
    for name, value in zip(names, found, strict=True):
        reasons.append(f.when(value.isNull(), f.lit(f"--select cannot compute the column {name} of this row")))
    why = f.coalesce(*reasons)
    is_text = LINE in rows.columns
    hidden = {
        FILE: f.col(FILE) if FILE in rows.columns else f.lit(None).cast("string"),
        LINE: f.col(LINE) if is_text else f.when(why.isNotNull(), f.to_json(f.struct(*map(quoted, given.columns)))),
        WHY: why,
    }
    columns = [value["value"].alias(name) for name, value in zip(names, found, strict=True)]
    return rows.select("*", *tried).select(*columns, *(value.alias(name) for name, value in hidden.items()))


def _expressions(given: DataFrame, select: str) -> Any:
    """Return the struct of Spark's resolved expressions. Raises SettingError."""
    try:
        found: Any = given.select(f.expr(f"struct(\n{select}\n)"))
    except (AnalysisException, ParseException) as error:
        sentence = re.sub(r";? *SQLSTATE: \w+", "", str(error).strip().partition("\n")[0]).rstrip("; ")
        where = re.sub(r"line (\d+)", lambda found: f"line {int(found[1]) - 1}", sentence)
        raise SettingError(f"--select: {where}") from None
    plan, rows = (each._jdf.queryExecution().analyzed() for each in (found, given))  # noqa: SLF001 - no public API
    if not plan.getClass().getName().endswith(".Project") or not plan.child().sameResult(rows):
        raise SettingError("--select: an expression can use one row only, so neither groups nor windows are allowed")
    made = plan.projectList().apply(0).child()
    if not made.deterministic() or _OF_ATTEMPT & {*re.findall(r'"class":"[\w.]+\.(\w+)"', made.toJSON())}:
        raise SettingError(
            f"--select: {made.sql()[:200]} has another value at each attempt, which would register other tasks. Make "
            "IDs and times from columns of the input"
        )
    return made


def _used(value: Any) -> Iterator[str]:
    found = value.references().toSeq()
    yield from (found.apply(number).name() for number in range(found.size()))


def _tried(rows: DataFrame, value: Any) -> Any:
    """Return a column that has the value inside, or is NULL after an error."""
    jvm: Any = rows.sparkSession.sparkContext._jvm  # noqa: SLF001 - no public API
    column, column_class = jvm.org.apache.spark.sql.classic.ExpressionUtils, type(f.lit(1))
    inside = f.struct(column_class(column.column(value)).alias("value"))
    whole = jvm.org.apache.spark.sql.catalyst.expressions.TryEval(column.expression(inside._jc))  # noqa: SLF001 - the same
    return column_class(column.column(whole))
