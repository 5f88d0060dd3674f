"""The section `[telemetry]`."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import NonEmpty, PositiveFloat, Section
from asyncrl.config.sections.secret import SecretPath


class TelemetryConfig(Section):
    """Output of the run besides its checkpoints."""

    samples_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = 8
    """Number of samples of each step that are written to samples.jsonl, in whole groups: one group at least, unless it
    is 0."""
    samples_gb: PositiveFloat = 1.0
    """Most gigabytes of samples.jsonl. When it has more, every second of its steps is left out, and of later ones."""
    print_every: Annotated[int, Field(ge=0)] = 1
    """Number of steps between two lines of output that is piped to a file; all metrics are in metrics.jsonl. 0: neither
    steps, evaluations nor what the run waits for are printed, on a terminal too; warnings and errors always are."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Services that get the metrics besides metrics.jsonl."""
    wandb_project: str = ""
    """Project of the run at wandb; default: the environment variable WANDB_PROJECT, else asyncrl."""
    wandb_tags: tuple[NonEmpty, ...] = ()
    """Tags of the run at wandb."""
    on_step: str = ""
    """Function FILE.py:NAME or module:NAME that is called in the run's loop with the metrics of each step, a dict, and
    returns whether the run shall end. Empty: none is called."""
    trace: bool = True
    """Writes trace.json.gz, which opens in Perfetto."""
    report: bool = True
    """Writes report.html when the run ends: curves, timeline and samples in one file for a browser."""
    record_gb: Annotated[float, Field(ge=0)] = 0.0
    """Most gigabytes that each worker writes of what it was called with, read and answered, for `asyncrl replay`; the
    oldest is forgotten. 0: nothing is recorded."""
    otlp: str = ""
    """URL of an OpenTelemetry collector that gets the spans of the trace by OTLP over HTTP, such as
    http://127.0.0.1:4318. Empty: none does."""
    prometheus: str = ""
    """Address HOST:PORT at which the controller serves its metrics to Prometheus, such as 127.0.0.1:9400. Empty: it
    serves none."""
    prometheus_token: SecretPath = ""
    """File with a token that scrapes have to send as a bearer. An address that other hosts reach needs one."""
