"""Jobs of the cluster."""


class Job: ...
