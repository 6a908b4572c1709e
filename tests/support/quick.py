"""The Spark tests of `make test`: each job once, on small data, and the bounds of the archive. Others are extended."""

SPARK = frozenset({
    "test_rejected_rows_can_be_corrected_and_registered",
    "test_windows_adjoin_and_only_archived_tasks_are_purged",
    "test_every_sendable_task_is_sent_and_the_others_are_counted",
    "test_the_page_of_the_audit",
    "test_purged_tasks_are_restored_from_the_archive",
    "test_the_table_can_be_read_as_a_dataframe",
    "test_available_now_reads_everything_after_an_unfinished_batch",
    "test_a_repeated_micro_batch_registers_nothing_twice",
})  # fmt: skip
