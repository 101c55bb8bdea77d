"""What comes after `hvd-ddp`, one file a command: the module of each has `run`, and `Options`."""

COMMANDS = {
    "train": "hvd_ddp.commands.train",
    "evaluate": "hvd_ddp.commands.evaluate",
    "predict": "hvd_ddp.commands.predict",
    "data": "hvd_ddp.commands.data",
    "bench": "hvd_ddp.commands.bench",
    "plot": "hvd_ddp.commands.plot",
    "doctor": "hvd_ddp.commands.doctor",
    "parity": "hvd_ddp.commands.parity",
    "scaling": "hvd_ddp.commands.scaling",
    "submit": "hvd_ddp.commands.submit",
    "launch": "hvd_ddp.commands.launch",
    "completion": "hvd_ddp.commands.completion",
    "install-horovod": "hvd_ddp.commands.install_horovod",
}
