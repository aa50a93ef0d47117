"""A small serving engine on top of the selector: the witness that a chosen backend carries a real model.

Importing this package loads torch; transformers is loaded when weights are.
"""

from heedful.runner.engine import Engine
from heedful.runner.model import ModelConfig
from heedful.runner.model_runner import ModelRunner, RunnerOptions
from heedful.runner.sampling import SamplingParams
from heedful.runner.scheduler import Request
from heedful.runner.streaming import Generation, generate
from heedful.runner.weights import Checkpoint, load_checkpoint, load_smollm2

__all__ = [
    "Checkpoint",
    "Engine",
    "Generation",
    "ModelConfig",
    "ModelRunner",
    "Request",
    "RunnerOptions",
    "SamplingParams",
    "generate",
    "load_checkpoint",
    "load_smollm2",
]
