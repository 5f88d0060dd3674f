"""The section `[telemetry]`."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import NonEmpty, PositiveFloat, Section
from asyncrl.config.sections.secret import SecretPath


class TelemetryConfig(Section):
    """Output of the run besides its checkpoints."""

    samples_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = 8
    """Samples of each step in samples.jsonl, in whole groups: at least one, unless it is 0."""
    samples_gb: PositiveFloat = 1.0
    """Most gigabytes of samples.jsonl; beyond, every second of its steps is left out."""
    print_every: Annotated[int, Field(ge=0)] = 1
    """Steps between two lines of output to a file; 0 prints warnings and errors only, on a terminal too."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Services that get the metrics besides metrics.jsonl."""
    wandb_project: str = ""
    """Project of the run at wandb; default: WANDB_PROJECT, else asyncrl."""
    wandb_tags: tuple[NonEmpty, ...] = ()
    """Tags of the run at wandb."""
    on_step: str = ""
    """Function FILE.py:NAME or module:NAME that gets the metrics of each step, a dict, and returns whether the run
    shall end."""
    trace: bool = True
    """Writes trace.json.gz, which opens in Perfetto."""
    report: bool = True
    """Writes report.html when the run ends."""
    record_gb: Annotated[float, Field(ge=0)] = 0.0
    """Gigabytes of each worker's newest calls that are kept for `asyncrl replay`; 0: none."""
    otlp: str = ""
    """URL of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318."""
    prometheus: str = ""
    """Address HOST:PORT of metrics for Prometheus, such as 127.0.0.1:9400. Empty: none."""
    prometheus_token: SecretPath = ""
    """File with a bearer token for scrapes, which an address that other hosts reach needs."""
