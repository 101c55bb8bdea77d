"""The error the user can mend, and the exit codes."""

FINISHED = 0
FAILED = 1
USER_ERROR = 2
STOPPED_EARLY = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 130


class HvdDDPError(Exception):
    """Something the user can mend: what is set, why it is wrong, what to do.

    `main` prints it as one paragraph, once a job, without a traceback, and exits with 2.
    """

    exit_code = USER_ERROR
    everywhere = True  # all ranks raise the same: one of them says it


class RankFailedError(HvdDDPError):
    """A rank failed or never came: said in one paragraph that names it; exits with 1."""

    exit_code = FAILED


class RankZeroMissingError(RankFailedError):
    """Rank 0, which would say what is wrong for all, never came: each rank says so."""

    everywhere = False
