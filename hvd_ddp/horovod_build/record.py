"""What the installed Horovod was built for. Light: imports neither torch nor Horovod.

It stands outside of `hvd_ddp.backends`, which imports torch: install-horovod runs also where torch is missing.
"""

import json
from importlib.util import find_spec
from pathlib import Path

from hvd_ddp.errors import HvdDDPError

RECORD = "hvd_ddp_build.json"  # `install-horovod` puts it into the wheel, beside horovod/__init__.py


def built_for() -> dict[str, str] | None:
    """Return the record of the Horovod that `import horovod` would find, or None.

    Keys: key, horovod, torch, python, platform, cpu, mpi ("none" without), mpi_flags, gpu ("none" without), mends.
    None means that there is no Horovod, or one that `install-horovod` did not build: nothing is known of it then.
    """
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    try:
        record: dict[str, str] = json.loads((Path(spec.origin).parent / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record


def check_build(torch_version: str) -> None:
    """Raise HvdDDPError if the installed Horovod was built for another torch than `torch.__version__`.

    Its library is linked against torch's C++ symbols, which change from release to release: the import would end in an
    undefined symbol, or in a crash later. A Horovod without our record is given the benefit of the doubt.
    """
    record = built_for()
    if record is not None and record.get("torch") != torch_version:
        raise HvdDDPError(
            f"Horovod was built for torch `{record.get('torch')}`, this is torch `{torch_version}`. It would fail on "
            f"undefined symbols or crash. Run `python -m hvd_ddp install-horovod` again."
        )
