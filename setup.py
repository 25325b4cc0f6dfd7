"""Package description; the tool settings stand in setup.cfg."""
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_requirements() -> list[str]:
    """One requirement per line of requirements.txt, comments dropped."""
    lines = (line.split("#")[0].strip() for line in (HERE / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line]


setup(
    name="prolip-train",
    version="0.1.0",
    description="Probabilistic vision-language pre-training on OpenCLIP: every image and every text is a Gaussian",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={
        "prolip": ["models/configs/*.json", "models/configs/transformers/*/*.json", "report/*.j2", "curate/*.j2",
                   "hub/*.j2", "explorer/*.j2", "explorer/*.js", "explorer/*.css", "evaluation/suites/datacomp/*.csv",
                   "py.typed"],
        "training": ["retired_flags.json"],
    },
    entry_points={"console_scripts": ["prolip=prolip.cli.main:script",
                                      "prolip-clip-benchmark=prolip.cli.main:clip_benchmark"]},
    install_requires=read_requirements(),
    extras_require={
        "test": ["pytest>=8", "pytest-timeout", "pytest-xdist>=3.5", "hypothesis", "mpmath", "ruff", "mypy",
                 "sentencepiece",
                 "eccv_caption>=0.1,<0.2",  # the oracle of COCO 5K, CxC and ECCV Caption
                 "s3fs>=2025.9", "moto[s3]>=5.1,<6", "flask>=3,<4", "flask-cors>=6,<7",  # a local S3
                 "onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.2",
                 "qdrant-client>=1.20,<2",  # a database that docs/search.md hands vectors to, in memory
                 "playwright>=1.40,<2",  # drives Debian's chromium through the explorer's page
                 "mkdocs>=1.6,<2", "mkdocs-material>=9.8,<10", "mkdocstrings[python]>=1,<2",  # the site
                 "nbclient>=0.11,<1", "nbformat>=5.11,<6", "ipykernel>=7,<8",
                 "resvg-py>=0.5,<0.6", "scikit-image>=0.24,<0.27"],
        "corpora": ["resvg-py>=0.5,<0.6"],  # draws SVGs; 0.5.0 draws the bundled emoji byte for byte
        "study": ["scikit-image>=0.24,<0.27"],  # its photographs are foreign inputs of scripts/uncertainty_study.py
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.8,<10", "mkdocstrings[python]>=1,<2"],  # make site
        "export": ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.2"],
        "hf": ["transformers>=4.40", "huggingface_hub", "sentencepiece"],
        "s3": ["s3fs>=2025.9"],
    },
)
