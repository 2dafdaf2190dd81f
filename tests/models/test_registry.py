"""Architecture names lead to classes, and looking a name up costs no import of torch."""

import subprocess
import sys

import pytest

from vllm_clone.errors import ModelLoadError
from vllm_clone.models.base import CausalLM
from vllm_clone.models.registry import MODELS, check_architecture, get_model_class


@pytest.mark.parametrize("architecture", MODELS)
def test_every_name_has_its_class(architecture: str) -> None:
    model_class = get_model_class(architecture)
    assert issubclass(model_class, CausalLM)
    assert model_class.__name__ == architecture


def test_unknown_name() -> None:
    with pytest.raises(ModelLoadError, match="known architectures: GPT2LMHeadModel, Gemma2ForCausalLM"):
        check_architecture("FalconForCausalLM")


def test_checking_a_name_imports_no_torch() -> None:
    code = "import sys; from vllm_clone.models.registry import *; check_architecture('LlamaForCausalLM');"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
