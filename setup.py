"""The package, what it needs, and the `megappo` command. Exact versions are in requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megappo" / "__init__.py").read_text()).group(1)  # type: ignore[union-attr]

INSTALL_REQUIRES = [
    "torch>=2.11,<2.14",
    "megatron-core>=0.16.1,<0.20; sys_platform == 'linux'",
    "megatron-core>=0.16.1,<0.17; sys_platform != 'linux'",  # later ones import Triton, which is for Linux
    # megatron-core 0.18 on, for Python 3.12 on, imports Triton without a GPU too; torch brings it for CUDA alone.
    "triton>=3; sys_platform == 'linux' and python_version >= '3.12'",
    "packaging>=23",
    "psutil>=5.9",  # megatron-core 0.16.1 hangs in a checkpoint save without it, and does not declare it
    "transformers>=4.57,<6",
    "sentencepiece>=0.2,<0.3",
    "protobuf>=4.25,<8",  # transformers reads sentencepiece models with it
    "jinja2>=3.1,<4",  # chat templates
    "safetensors>=0.6,<1",
    "datasets>=3,<6",
    "pyarrow>=17",
    "numpy>=1.26,<3",
    "math-verify[antlr4_13_2]>=0.8,<0.10",
    "pydantic>=2.11,<3",
    "pyyaml>=6,<7",
    "rich>=13,<16",
    "tensorboard>=2.16,<3",
    "nvidia-ml-py>=12",
]

EXTRAS_REQUIRE = {
    "vllm": ["vllm>=0.20,<0.33"],
    "ray": ["ray[default]>=2.40,<3"],
    "te": ["transformer-engine[pytorch]>=2.12,<3"],
    "wandb": ["wandb>=0.19,<1"],
    "mlflow": ["mlflow>=2.20,<4"],
    "plots": ["matplotlib>=3.9,<4"],  # tools/learning_curves.py
    "dev": [
        "pytest>=8,<10",
        "pytest-xdist>=3.6,<4",
        "ruff>=0.14,<0.18",
        "mypy>=1.15,<3",
        "import-linter>=2.3,<3",
        "types-PyYAML>=6,<7",
        "types-psutil>=6,<8",
        "gguf>=0.17,<0.20",  # tools/import_gguf.py
        "peft>=0.18,<0.22",  # a test loads exported adapters with it
        "accelerate>=1,<2",  # transformers de-quantises GGUF files with it
    ],
}

setup(
    name="megappo",
    version=VERSION,
    description="PPO for language models on Megatron shards",
    packages=find_packages(include=["megappo", "megappo.*"]),
    package_data={"megappo": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["megappo = megappo.cli.main:main"]},
)
