"""The Spark tests of `make test`: each job once, on small data, and the bounds of the archive. Others are extended."""

SPARK = frozenset({
    "test_files_of_every_format_become_tasks",
    "test_windows_follow_each_other_and_only_what_they_prove_is_deleted",
    "test_all_that_can_be_sent_is_sent_and_what_stays_is_told",
    "test_the_page_of_the_audit",
    "test_what_was_purged_comes_back_from_the_archive_as_it_was",
    "test_the_table_is_a_dataframe",
    "test_what_is_available_now_is_read_though_a_batch_was_left_unfinished",
    "test_readers_choose_times_and_get_windows_in_order",
})  # fmt: skip
