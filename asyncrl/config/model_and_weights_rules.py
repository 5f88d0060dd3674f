"""Rules about the sections `[model]` and `[weights]`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def model_problems(config: "Config") -> Iterator[Problem]:
    """Yields warnings about values that nothing reads, and about what adapters do not change."""
    model, critic = config.model, config.algorithm.advantage == "gae"
    if model.float32_head and model.dtype == config.training.precision == "float32":
        text = "it changes nothing, because everything is computed in float32 already: remove float32_head"
        yield Problem("model.float32_head", "", text, ("model.dtype", "training.precision"), is_warning=True)
    if model.lora is not None and critic:
        text = (
            "the policy has adapters, but a critic trains all weights of its own model, which takes the memory of full "
            'training; and critics read reference log-probs, so those come from a service: write preset = "grpo" to '
            "save that memory"
        )
        yield Problem("model.lora", "", text, ("algorithm.advantage",), is_warning=True)
    if config.algorithm.kl > 0 and not config.reference_by_service:
        for key in sorted(config.reference.model_dump(exclude_defaults=True)):
            text = "nothing reads it with model.lora: the trainer computes the reference log-probs; remove it"
            yield Problem(f"reference.{key}", "", text, ("model.lora",), is_warning=True)


def weights_problems(config: "Config") -> Iterator[Problem]:
    """Yields what is wrong with the section, and warnings about values that nothing reads."""
    section = config.weights
    if config.generation.engine == "vllm" and section.transport not in ("auto", "shm"):
        text = 'vLLM reads new weights from the shared memory of its host: write "auto" or "shm"'
        yield Problem("weights.transport", "", text, ("generation.engine",))
    if section.codec != "dense" and section.transport not in ("auto", "tcp"):
        text = 'only weights that cross a network are encoded: remove it, or write weights.transport = "tcp"'
        yield Problem("weights.codec", "", text, ("weights.transport",), is_warning=True)
    if section.codec in ("bfloat16", "float16") and config.model.dtype == "bfloat16":
        text = "weights of bfloat16 have as few bytes already: remove it"
        yield Problem("weights.codec", "", text, ("model.dtype",), is_warning=True)
    yield from _device_problems(config)
    if section.folder and section.transport != "file":
        text = 'nothing reads it: remove it, or write weights.transport = "file"'
        yield Problem("weights.folder", "", text, ("weights.transport",), is_warning=True)


def _device_problems(config: "Config") -> Iterator[Problem]:
    """Yields a problem when a named transport cannot work between the devices of trainer and generation."""
    named, keys = config.weights.transport, ("training.device", "generation.device")
    devices = [numbered(config.training.device), numbered(config.generation.device)]
    found = f"training is on {devices[0]}, generation on {devices[1]}"
    if named in ("nccl", "cuda_ipc") and not all(device.startswith("cuda") for device in devices):
        text = f'"{named}" moves weights between GPUs, but {found}: write "auto", or "gloo" for its twin on CPUs'
        yield Problem("weights.transport", "", text, keys)
    elif named == "nccl" and devices[0] == devices[1]:
        text = (
            f'{found}, and NCCL wants one GPU for each of its ranks: write "cuda_ipc", or give them different devices'
        )
        yield Problem("weights.transport", "", text, keys)
    elif named == "cuda_ipc" and devices[0] != devices[1]:
        text = f'{found}, and "cuda_ipc" reads memory of one GPU: write "nccl", or give them one device'
        yield Problem("weights.transport", "", text, keys)
    elif named == "gloo" and devices != ["cpu", "cpu"]:
        text = f'"gloo" moves weights between CPUs, but {found}: write "auto"'
        yield Problem("weights.transport", "", text, keys)
    if named == "cuda_ipc" and config.fleet.wire == "inproc":
        text = 'a process cannot open CUDA memory of its own: write "auto", or another fleet.wire'
        yield Problem("weights.transport", "", text, ("fleet.wire",))


def numbered(device: str) -> str:
    """Returns the device with its number: "cuda" is "cuda:0"."""
    return "cuda:0" if device == "cuda" else device
