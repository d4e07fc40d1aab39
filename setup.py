"""Which packages there are; everything else stands in pyproject.toml.

The folder ``ops/`` lies beside ``deepspeed_muon/`` and is installed as ``deepspeed_muon.ops``. Nothing here may
import torch: pip runs this file in an environment that has none.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["deepspeed_muon", "deepspeed_muon.*"]),
        "deepspeed_muon.ops",
        *(f"deepspeed_muon.ops.{name}" for name in find_packages("ops")),
    ],
    package_dir={"deepspeed_muon.ops": "ops"},
    package_data={
        "deepspeed_muon": ["py.typed"],
        "deepspeed_muon.ops": ["csrc/**/*"],
    },
)
