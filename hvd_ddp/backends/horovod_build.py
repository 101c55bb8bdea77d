"""What the installed Horovod was built for, under the name by which backends know it; see `hvd_ddp.horovod_record`."""

from hvd_ddp.horovod_record import RECORD, built_for, check_build

__all__ = ["RECORD", "built_for", "check_build"]
