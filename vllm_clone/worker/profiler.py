"""Traces of engine steps by torch's profiler."""

import os

import torch

from vllm_clone.config.profiler import ProfilerOptions
from vllm_clone.logger import init_logger

logger = init_logger(__name__)


class StepProfiler:
    """Records steps between start and stop; one trace file each time."""

    def __init__(self, options: ProfilerOptions) -> None:
        self._options = options
        self._recording: torch.profiler.profile | None = None
        self._armed = False
        self._steps = 0

    def start(self) -> None:
        """Begin, after the steps that ``delay_iterations`` leaves out; nothing when it is running."""
        if not self._armed:
            self._armed, self._steps = True, 0
            self._begin_when_due()

    def stop(self) -> None:
        """End and write the trace; nothing when it is not running."""
        self._armed = False
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
            logger.info("A trace of %d steps is in %s", self._recorded, self._options.torch_profiler_dir)

    def step_done(self) -> None:
        """A step has been executed."""
        if not self._armed:
            return
        self._steps += 1
        if self._recording is not None and self._recorded == self._options.max_iterations:
            self.stop()
        self._begin_when_due()

    @property
    def _recorded(self) -> int:
        return self._steps - self._options.delay_iterations

    def _begin_when_due(self) -> None:
        if not self._armed or self._recording is not None or self._recorded < 0:
            return
        options = self._options
        os.makedirs(options.torch_profiler_dir, exist_ok=True)
        self._recording = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=options.torch_profiler_record_shapes,
            profile_memory=options.torch_profiler_with_memory,
            with_stack=options.torch_profiler_with_stack,
            with_flops=options.torch_profiler_with_flops,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                options.torch_profiler_dir, use_gzip=options.torch_profiler_use_gzip
            ),
        )
        self._recording.start()
