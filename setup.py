"""Package of deepspeed_pulse; pinned versions for a fresh machine are in constraints.txt."""

from setuptools import find_packages, setup

setup(
    name="deepspeed_pulse",
    version="0.1.0",
    description="Wave pipelines for DeepSpeed: long skip connections of diffusion backbones stay on one rank",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed_pulse", "deepspeed_pulse.*"]),
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
        "dev": [
            "hypothesis",
            "mypy",
            "ninja",
            "peft",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "scikit-image",
            "transformers",
        ],
    },
    entry_points={"console_scripts": ["ds_pulse=deepspeed_pulse.cli:main"]},
)
