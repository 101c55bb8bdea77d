"""scaling --simulate: efficiency and exposed communication on up to 4,096 ranks, worked out from one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from hvd_ddp.commands.plot import STYLES, refuse_to_replace, render
from hvd_ddp.commands.scaling_table import refuse_other_csv
from hvd_ddp.commands.simulate_table import COLUMNS, Point, as_csv, assumptions, points, show
from hvd_ddp.commands.starters import outside
from hvd_ddp.commands.train import config_of, parse_as
from hvd_ddp.config import TrainConfig
from hvd_ddp.costs import Costs, Link
from hvd_ddp.durable import replace_file
from hvd_ddp.errors import FINISHED, HvdDDPError
from hvd_ddp.outside import from_json, read

MOST_MODELS = 4  # that fit beside each other

DESCRIPTION = """Work out how a model scales to 1, 2, 4, ... 4,096 ranks: nothing but one rank is measured.

Takes all options of train; --global-batch is the samples of one rank. Records how long a step takes on this CPU and
when its backward completes each gradient, and works out from that what an all_reduce by ring and by tree leaves exposed
on links of several rates. Prints a table with what is assumed; writes OUTPUT.json (what was recorded), OUTPUT.csv,
OUTPUT.png and OUTPUT.svg."""


@dataclass(frozen=True)
class Options(TrainConfig):
    """Options that are not part of the run."""

    config: Path | None = None
    """As for train."""
    costs: tuple[Path, ...] = ()
    """OUTPUT.json of earlier calls, up to 4: nothing is recorded, and these models stand beside each other."""
    step_seconds: float | None = None
    """What a step takes on the device in question, such as a GPU: all that was recorded is scaled to it."""
    gbit: tuple[float, ...] = (10.0, 100.0, 400.0)
    """Rates of a rank's link, in Gbit/s each way."""
    latency_us: float = 5.0
    """Microseconds that a message takes, whatever its size."""
    goodput: float = 0.95
    """Share of the rate that carries gradients."""
    host_ns: float = 0.0
    """Nanoseconds of the rank's own core for each byte sent and another received; 0: the adapter moves them."""
    output: Path = Path("simulated")
    """Files to write, without their endings; those of an earlier call are replaced."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for values that can't work."""
        super().__post_init__()
        if not 1 <= len(self.gbit) <= len(STYLES) or not all(0 < rate < math.inf for rate in self.gbit):
            raise ValueError(f"--gbit is `{self.gbit}`. Give from 1 to {len(STYLES)} numbers above 0.")
        if self.step_seconds is not None and not 0 < self.step_seconds < math.inf:
            raise ValueError(f"--step-seconds is `{self.step_seconds}`. Give a number above 0.")
        if not 0 < self.goodput <= 1:
            raise ValueError(f"--goodput is `{self.goodput}`. Give a share from above 0 to 1.")
        for name, value in (("--latency-us", self.latency_us), ("--host-ns", self.host_ns)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is `{value}`. Give a number from 0 up.")
        if len(self.costs) > MOST_MODELS or (self.step_seconds is not None and len(self.costs) > 1):
            raise ValueError(
                f"--costs has `{len(self.costs)}` files. Give up to {MOST_MODELS}, with --step-seconds one."
            )
        if self.compression != "none" or self.adasum:
            raise ValueError("--compression and --adasum are not simulated. Leave them out.")


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp scaling --simulate`."""
    outside("scaling")
    options = parse_as(Options, arguments, "scaling --simulate", description=DESCRIPTION)
    files = {kind: options.output.with_name(f"{options.output.name}.{kind}") for kind in ("csv", "png", "svg", "json")}
    refuse_other_csv(files["csv"], COLUMNS)
    for kind in ("png", "svg"):
        refuse_to_replace(files[kind])
    if options.costs:
        files.pop("json")
    elif files["json"].exists():
        _read(files["json"])  # only what this command wrote is replaced
    models = [_read(path) for path in options.costs] or [_record(options)]
    seconds = options.step_seconds
    scaled = [costs if seconds is None else costs.scaled(seconds) for costs in models]
    links = {
        rate: Link(rate * 1e9, options.latency_us / 1e6, options.goodput, options.host_ns / 1e9)
        for rate in dict.fromkeys(options.gbit)
    }
    bucket = None if options.bucket_mb is None else int(options.bucket_mb * (1 << 20))
    found = points(scaled, links, bucket)
    try:
        if "json" in files:
            replace_file(files["json"], json.dumps(models[0].to_dict()).encode())
        replace_file(files["csv"], as_csv(found).encode())
        _draw(files, found, options)
    except OSError as error:
        raise HvdDDPError(f"`{error.filename}` can't be written: {error.strerror}. Give another --output.") from error
    if options.json:
        print(json.dumps({"rows": [point.to_dict() for point in found]}), flush=True)
        return FINISHED
    show(found)
    print(assumptions(links[options.gbit[0]], bucket))
    print(", ".join(str(path) for path in files.values()), flush=True)
    return FINISHED


def _record(options: Options) -> Costs:
    from hvd_ddp.commands.simulate_record import record_training

    return record_training(config_of(options, backend="local", transport="auto", device="cpu", nproc=None))


def _read(path: Path) -> Costs:
    try:
        return Costs.from_dict(from_json(read(path)))
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise HvdDDPError(f"`{path}` holds no costs of a step: {said}. Give what scaling --simulate wrote.") from error


def _draw(files: dict[str, Path], found: list[Point], options: Options) -> None:
    from hvd_ddp.commands.simulate_plot import draw

    title = (
        f"simulated, weak scaling: {options.latency_us:g} µs a message, {100 * options.goodput:g} % of the rate for "
        f"gradients, {options.host_ns:g} ns of a core for each byte"
    )
    for kind in ("png", "svg"):
        replace_file(files[kind], render(lambda figure: draw(figure, found, title), kind))
