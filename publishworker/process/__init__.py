"""The `publishworker` command, and how it ends: exit codes that a supervisor or a script may rely on."""

DONE, FAILED, NOT_REACHED, WORK_LEFT = 0, 1, 3, 4
