"""How the commands end: what a supervisor or a script may rely on."""

DONE, FAILED, USAGE, NOT_REACHED, WORK_LEFT, INTERRUPTED = 0, 1, 2, 3, 4, 130
