"""What every test runs under."""

import os

# Several test processes share the cores; kernels whose threads wait for each other would only slow each other down.
os.environ.setdefault("VLLM_CPU_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Model files come from packages and fixtures; nothing may look for them on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
