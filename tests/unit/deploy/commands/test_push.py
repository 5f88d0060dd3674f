"""A model is uploaded to the Hugging Face hub, whose place its own class takes here, with the calls that it allows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import httpx2
import huggingface_hub
import pytest

from asyncrl.deploy import cli
from asyncrl.deploy.commands import export as command
from asyncrl.errors import ConfigError

ADDRESS = "https://hub.test/me/tiny/commit/1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = create_autospec(huggingface_hub.HfApi, instance=True)
    found.endpoint = "https://hub.test"
    found.upload_folder.return_value = SimpleNamespace(commit_url=ADDRESS)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    return found


@pytest.mark.parametrize("public", [False, True])
def test_the_exported_model_of_a_run_is_committed_to_the_hub(
    public: bool, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported: list[Any] = []
    monkeypatch.setattr(command, "export", lambda *given, **wanted: exported.append((*given, wanted)) or 4)
    flags = ["--public"] if public else []
    assert cli.main(["push", str(tmp_path / "run"), "me/tiny", "--step", "4", "--merge", *flags]) == 0
    assert capsys.readouterr().out == f"version 4 is at {ADDRESS}\n"
    ((run, folder, wanted),) = exported
    assert (run, wanted) == (tmp_path / "run", {"merged": True, "step": "4", "public": True})
    hub.create_repo.assert_called_once_with("me/tiny", private=not public, exist_ok=True)
    message = "asyncrl: step 4 of run"
    hub.upload_folder.assert_called_once_with(repo_id="me/tiny", folder_path=folder, commit_message=message)


@pytest.mark.parametrize("error", [OSError("this token may not write\nmore"), httpx2.ConnectError("no route")])
def test_a_refusal_is_told(error: Exception, hub: Any, tmp_path: Path) -> None:
    hub.create_repo.side_effect = error
    says = rf"^me/tiny could not be uploaded to https://hub.test: {str(error).partition(chr(10))[0]}; look .*HF_TOKEN"
    with pytest.raises(ConfigError, match=says):
        command.upload(tmp_path, "me/tiny", "a message", public=False)
