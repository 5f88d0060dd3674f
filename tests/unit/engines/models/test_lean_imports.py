import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.engines.models.lean_imports import COMPILER


def run(code: str) -> None:
    """In a fresh process, in which nothing was imported before."""
    begin = "import sys\nfrom asyncrl.engines.models.lean_imports import import_less\nimport_less()\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


NO_TRITON = pytest.mark.skipif(find_spec("triton") is not None, reason="with Triton nothing of the compiler is put off")


@NO_TRITON
def test_services_import_neither_the_compiler_nor_sympy_and_ranks_have_torch_distributed() -> None:
    run(
        "import asyncrl.services.generation, asyncrl.services.training, asyncrl.services.critic\n"
        "found = {'sympy', 'torch._dynamo.config', 'torch.distributed.tensor'} & set(sys.modules)\n"
        "assert not found, found\n"
        "import torch.distributed\n"
        "assert torch.distributed.is_available()\n"
    )


@NO_TRITON
def test_the_compiler_is_there_when_it_is_used() -> None:
    run(
        "import torch\n"
        "import torch._dynamo\n"
        "@torch._dynamo.allow_in_graph\n"
        "def allowed(x): return x + 1\n"
        "@torch.compiler.disable\n"
        "def disabled(x): return x + 1\n"
        "assert 'torch._dynamo.config' not in sys.modules\n"
        "assert torch._dynamo.config is not None\n"
        "assert torch._dynamo.disable.__module__.startswith('torch._dynamo')\n"
        "assert id(allowed) in torch._dynamo.trace_rules._allowed_callable_ids.function_ids\n"
        "compiled = torch.compile(lambda x: allowed(x) * 2, backend='eager')\n"
        "assert compiled(torch.ones(1)).item() == 4\n"
        "assert disabled(torch.ones(1)).item() == 2\n"
    )


def test_with_triton_the_compiler_is_imported_as_ever(tmp_path: Path) -> None:
    """On a GPU the body of torch._dynamo ran in the middle of an import of its parts, and no model could be made."""
    (tmp_path / "triton").mkdir()
    begin = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    begin += "from asyncrl.engines.models.lean_imports import import_less\n"
    code = "import_less()\nsys.path.pop(0)\nimport torch._dynamo\nassert 'torch._dynamo.config' in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_transformers_finds_the_same_models() -> None:
    run(
        "import importlib.util\n"
        "from pathlib import Path\n"
        "from transformers.utils import import_utils as lean\n"
        "spec = importlib.util.spec_from_file_location('transformers.utils.original', lean.__file__)\n"
        "original = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(original)\n"
        "assert lean.fetch__all__ is not original.fetch__all__\n"
        "models = Path(lean.__file__).parents[1] / 'models'\n"
        "found = lean.define_import_structure(models)\n"
        "assert len(found) > 3\n"
        "assert found == original.define_import_structure(models)\n"
    )


def test_processes_of_the_user_are_left_alone() -> None:
    assert not [finder for finder in sys.meta_path if type(finder).__module__.endswith("lean_imports")]
    assert COMPILER == "torch._dynamo"
