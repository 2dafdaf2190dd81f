"""`vllm run-batch`: answer a file of requests without a server."""

import argparse
import contextlib
import os
import tempfile

from vllm_clone.config import ENGINE_GROUPS, FrontendConfig, VllmConfig
from vllm_clone.config.batch import SHARED, BatchFilesConfig, BatchFrontend
from vllm_clone.engine.arg_utils import EngineArgs, refuse_what_cannot_act
from vllm_clone.entrypoints.cli.checks import check_frontend
from vllm_clone.entrypoints.cli.parser import FlagParser, UsageError
from vllm_clone.errors import ConfigError

USAGE = "vllm run-batch -i INPUT.jsonl -o OUTPUT.jsonl --model MODEL [options]"
GROUPS = (BatchFilesConfig, BatchFrontend, *ENGINE_GROUPS.values(), VllmConfig)


def add_arguments(parser: FlagParser) -> None:
    for group in GROUPS:
        parser.add_config(group)


def run(args: argparse.Namespace) -> int:
    """Run the batch: 0 when every line has a result, even an error; 128 + N when signal N stopped it.

    Raises:
        ConfigError: a flag cannot be used, or the output is not this input's.
        OSError: input or output cannot be used.
        EngineDeadError: the engine cannot start, or died.
    """
    given = vars(args)
    files = BatchFilesConfig(**{k: v for k, v in given.items() if k in BatchFilesConfig.__dataclass_fields__})
    source, target = files.input_file, files.output_file
    if source is None or target is None:
        raise UsageError("run-batch: needs -i INPUT and -o OUTPUT")
    shared = {k: v for k, v in given.items() if k in SHARED}
    frontend = FrontendConfig(**shared, host=files.host, port=files.port)
    refuse_what_cannot_act(frontend)
    check_frontend(
        frontend,
        log_requests=given.get("enable_log_requests", False),
        log_stats=not given.get("disable_log_stats", False),
    )
    _check_target(source, target, files)
    from vllm_clone.entrypoints.batch.files import opened_input

    with opened_input(source) as (lines, size):
        config = EngineArgs.from_namespace(args).create_engine_config("server")
        return _run(config, frontend, files, lines, size)


def _check_target(source: str, target: str, files: BatchFilesConfig) -> None:
    from vllm_clone.entrypoints.batch.files import is_url

    if files.resume and (target == "-" or is_url(target)):
        raise ConfigError(f"--resume: {target} cannot be read back; give --output-file a path.")
    if files.output_tmp_dir is not None and not is_url(target):
        raise ConfigError("--output-tmp-dir: is for results that are uploaded; leave it out or give -o a URL.")
    with contextlib.suppress(FileNotFoundError):
        if "-" not in (source, target) and os.path.samefile(source, target):
            raise ConfigError(f"--output-file {target}: is the input too; choose another path.")


def _run(config: VllmConfig, frontend: FrontendConfig, files: BatchFilesConfig, lines: object, size: int | None) -> int:
    from vllm_clone.engine.engine_process import EngineProcess
    from vllm_clone.entrypoints.batch.files import ResultFile, is_url, upload
    from vllm_clone.entrypoints.batch.run import metrics_server, run_engine
    from vllm_clone.entrypoints.launchers.api_server import run_loop
    from vllm_clone.metrics.prometheus import new_registry

    target, registry = str(files.output_file), new_registry()
    path = target
    if is_url(target):
        handle, path = tempfile.mkstemp(".jsonl", "tmp_batch_output_", files.output_tmp_dir)
        os.close(handle)
    with contextlib.ExitStack() as stack:
        results = ResultFile(path, files.resume)
        stack.callback(results.close)
        if files.enable_metrics:
            stack.enter_context(metrics_server(registry, files.host, files.port))
        process = EngineProcess.start(config)
        stack.callback(process.close)
        code = run_loop(run_engine(config, frontend, process, registry, lines, size, results))
    if is_url(target) and code == 0:
        upload(path, target)
        os.unlink(path)
    return code
