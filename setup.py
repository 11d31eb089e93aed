"""Package of deepspeed_pulse; pinned versions for a fresh machine are in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "deepspeed_pulse/__init__.py").read_text("utf-8"), re.MULTILINE)

setup(
    name="deepspeed_pulse",
    version=VERSION[1],
    description="Wave pipelines for DeepSpeed: long skip connections of diffusion backbones stay on one rank",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed_pulse", "deepspeed_pulse.*"]),
    package_data={"deepspeed_pulse": ["py.typed", "schemas/*.json"]},
    install_requires=[
        "deepspeed>=0.18.4,<0.20",
        "diffusers>=0.35.2",
        "highspy>=1.7",
        "hjson",
        "huggingface_hub>=0.25",
        "matplotlib",
        "numpy",
        "pydantic>=2",
        "rich",
        "safetensors",
        "scipy",
        "torch>=2.4",
    ],
    extras_require={
        "npu": ["torch==2.13.*", "torch-npu==2.13.*"],  # of one minor version
        "examples": ["peft", "scikit-image", "transformers"],
        "docs": ["mkdocs-material", "mkdocstrings-python"],
        "dev": [
            "deepspeed_pulse[docs,examples]",
            "hypothesis",
            "jsonschema",
            "mypy",
            "ninja",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
        ],
    },
    entry_points={"console_scripts": ["ds_pulse=deepspeed_pulse.cli:main"]},
)
