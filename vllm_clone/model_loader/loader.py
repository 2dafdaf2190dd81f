"""Build a model and fill it, tensor by tensor, so that peak memory is little more than the weights' own size."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_clone.config import LoadConfig, VllmConfig
from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.gguf_linear import GGUFLinearMethod, StorageTypes
from vllm_clone.layers.linear import LinearBase, LinearMethod, UnquantizedLinearMethod
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.packed_linear import PackedLinearMethod
from vllm_clone.layers.weights import WeightModule
from vllm_clone.logger import init_logger
from vllm_clone.model_loader.checkpoint import (
    Checkpoint,
    CheckpointTensor,
    SafetensorsCheckpoint,
    TorchCheckpoint,
    find_files,
    prefetch,
    total_bytes,
)
from vllm_clone.model_loader.dummy import fill_with_dummies
from vllm_clone.model_loader.gguf import GGUFCheckpoint
from vllm_clone.models.base import CausalLM
from vllm_clone.models.checkpoint import Destination
from vllm_clone.models.registry import get_model_class

logger = init_logger(__name__)

DEFAULT_LOAD_THREADS = 8


@torch.no_grad()
def load_model(vllm_config: VllmConfig, device: torch.device) -> CausalLM:
    """The model of ``vllm_config`` with its weights on ``device``, ready for inference.

    Raises:
        ModelLoadError: unknown architecture, or a checkpoint that does not fit it; one line that names the file,
            the tensor, what was expected and what was found.
    """
    started = time.monotonic()
    config = vllm_config.model_config
    model_class = get_model_class(config.architecture, config.model_class_overrides)
    if config.hf_config.get("quantization_config"):
        scheme = config.hf_config["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(f"{config.path}: quantized checkpoints are not supported yet (quant_method {scheme!r})")
    dtype: torch.dtype = getattr(torch, config.dtype)
    method: LinearMethod
    method = PackedLinearMethod() if device.type == "cpu" else UnquantizedLinearMethod()
    hf_config, max_positions = config.hf_config, int(config.max_model_len or 0)
    if vllm_config.load_config.load_format == "dummy":
        model = model_class(hf_config, BuildOptions(dtype, device, method, max_positions))
        fill_with_dummies(model)
    else:
        checkpoint = open_checkpoint(Path(config.path), vllm_config.load_config, dtype)
        if isinstance(checkpoint, GGUFCheckpoint):
            hf_config = hf_config | checkpoint.config_additions()
            method = GGUFLinearMethod(StorageTypes()) if device.type == "cpu" else method
        model = model_class(hf_config, BuildOptions(dtype, device, method, max_positions))
        load_weights(model, checkpoint, show_progress=vllm_config.load_config.use_tqdm_on_load)
    if isinstance(method, GGUFLinearMethod):
        logger.info("quantization=gguf, %s", method.types.summary(config.dtype))
    gib = weight_bytes(model) / 2**30
    logger.info("Model loading took %.2f GiB memory and %.2f seconds", gib, time.monotonic() - started)
    return model.eval()


def open_checkpoint(path: Path, load: LoadConfig, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint at ``path``, a directory or a .gguf file; with "auto", in the first format that is there.

    Raises:
        ModelLoadError: no weight files of that format; the message says what was looked for.
    """
    load_format = {"hf": "auto"}.get(load.load_format, load.load_format)

    def wanted(files: list[Path]) -> list[Path]:
        return [f for f in files if not any(fnmatch(f.name, pattern) for pattern in load.ignore_patterns)]

    if path.is_file():
        if load_format not in ("auto", "gguf"):
            raise ModelLoadError(f"{path}: --load-format {load_format} needs a directory, found a file")
        return GGUFCheckpoint(path, dtype)
    if not path.is_dir():
        raise ModelLoadError(f"{path}: no such file or directory")
    if load_format in ("auto", "safetensors") and (files := wanted(find_files(path, "model", "safetensors"))):
        if load.safetensors_load_strategy == "prefetch":
            prefetch(files, load.safetensors_prefetch_num_threads, load.safetensors_prefetch_block_size)
        _read_ahead(files, load)
        return SafetensorsCheckpoint(files, whole=load.safetensors_load_strategy == "eager")
    if load_format in ("auto", "pt") and (
        files := wanted(find_files(path, "pytorch_model", "bin") or sorted(path.glob("*.pt")))
    ):
        _read_ahead(files, load)
        return TorchCheckpoint(files, load.pt_load_map_location)
    if load_format in ("auto", "gguf") and (files := wanted(sorted(path.glob("*.gguf")))):
        if len(files) > 1:
            raise ModelLoadError(f"{path}: found {len(files)} .gguf files; give the path of one: {files[0]}")
        return GGUFCheckpoint(files[0], dtype)
    looked_for = {"safetensors": "model*.safetensors", "pt": "pytorch_model*.bin or *.pt", "gguf": "*.gguf"}
    patterns = looked_for.get(load_format, ", ".join(looked_for.values()))
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
    raise ModelLoadError(f"{path}: no weight files; looked for {patterns}; found {found}")


def _read_ahead(files: list[Path], load: LoadConfig) -> None:
    """What ``enable_multithread_load`` asks for."""
    options = load.model_loader_extra_config
    if options.get("enable_multithread_load"):
        prefetch(files, options.get("num_threads", DEFAULT_LOAD_THREADS), load.safetensors_prefetch_block_size)


def load_weights(model: CausalLM, checkpoint: Checkpoint, *, show_progress: bool) -> None:
    """Fill every parameter of ``model`` from ``checkpoint``; each layer is prepared as soon as it is complete.

    Raises:
        ModelLoadError: a tensor is missing, unknown, or of another shape or dtype; or a file is damaged.
    """
    started = time.monotonic()
    modules = {path: m for path, m in model.named_modules() if isinstance(m, WeightModule)}
    bar = tqdm(
        total=total_bytes(checkpoint.files),
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not show_progress,
    )
    with bar, _one_torch_thread():
        for tensor in checkpoint.tensors():
            try:
                destination = model.weight_table.locate(tensor.name)
                if destination is not None and not (model.tied and destination.module == "lm_head"):
                    _place(modules, destination, tensor)
            except ModelLoadError as error:
                raise ModelLoadError(f"{tensor.file}: tensor {tensor.name}: {error}") from error
            bar.update(tensor.nbytes)
        bar.update(bar.total - bar.n)  # headers and padding
    _check_complete(model, modules, checkpoint)
    logger.info("Loading weights took %.2f seconds", time.monotonic() - started)


def _place(modules: dict[str, WeightModule], to: Destination, tensor: CheckpointTensor) -> None:
    module = modules.get(to.module)
    if module is None:
        raise ModelLoadError("the model has no such tensor (does config.json belong to these weights?)")
    if tensor.read_rows is not None and isinstance(module, LinearBase):
        module.load_weight(to.leaf, tensor.read_rows(), to.shard)
    else:
        data = tensor.read()
        module.load_weight(to.leaf, data.t() if to.transpose and data.dim() == 2 else data, to.shard)
    if not module.pending():
        module.prepare()


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Copy each tensor with one thread.

    torch would split every copy over its threads, which wait for each other each time; where the cores have other
    work too, that makes loading seven times slower (257 MiB on two busy cores: 1.85 s against 0.26 s).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_complete(model: CausalLM, modules: dict[str, WeightModule], checkpoint: Checkpoint) -> None:
    missing = [
        model.weight_table.source_name(path, leaf, shard)
        for path, module in modules.items()
        for leaf, shard in module.pending()
    ]
    missing = list(dict.fromkeys(missing))
    if missing:
        where = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.files[0].parent
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelLoadError(f"{where}: {len(missing)} tensors are missing: {shown}")


def weight_bytes(model: CausalLM) -> int:
    """Bytes of all parameters; tied ones count once."""
    return sum(parameter.nbytes for parameter in model.parameters())
