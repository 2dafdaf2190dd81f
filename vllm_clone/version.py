"""The version of the package and the vLLM release whose interface it follows."""

__version__ = "0.1.0"
VLLM_INTERFACE_VERSION = "0.32.0"
