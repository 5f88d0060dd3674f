"""`asyncrl push` uploads the model of a run's newest good checkpoint, or of another one, to the Hugging Face hub."""

import tempfile
from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser
from asyncrl.deploy.commands.export import export
from asyncrl.errors import ConfigError


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl push", description=f"{__doc__} HF_TOKEN, or `hf auth login`, lets it in.")
    parser.add_argument("run", type=Path, help="Name the run directory to upload from.")
    parser.add_argument("name", help="Name the model on the hub, OWNER/NAME; it is made when it does not exist.")
    parser.add_argument("--step", default="", metavar="N", help="Upload the checkpoint of this step, or `best`.")
    parser.add_argument("--merge", action="store_true", help="Merge the adapters of a run with model.lora.")
    parser.add_argument("--public", action="store_true", help="Let everybody see a model that is made now.")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="asyncrl-push-") as scratch:
        folder = Path(scratch) / "model"
        version = export(asked.run, folder, merged=asked.merge, step=asked.step, public=True)
        address = upload(folder, asked.name, f"asyncrl: step {version} of {asked.run.name}", public=asked.public)
    print(f"version {version} is at {address}")
    return 0


def upload(folder: Path, name: str, message: str, *, public: bool) -> str:
    """Uploads the files of a folder as one commit; returns its address. Raises ConfigError when the hub refuses it or
    cannot be reached."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (HTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{name} could not be uploaded to {api.endpoint}: {reason}; look at the name, HF_TOKEN and the network"
        ) from error
    return str(done.commit_url)
