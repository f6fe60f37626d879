"""What adoption makes of suites that others wrote: every skip by its reason, and the share that nobody understands.

`python -m benchmarks.adoption [SUITE …] [FOLDER]` downloads the source distributions of the installed transformers and
accelerate, and of peft, into FOLDER, and runs a bounded part of their tests on this machine, with no edit of a test.

transformers' source distribution holds its common tests only, which are mixins: `DRIVER` puts four small models under
them, as `tests/models` does in the repository; what the mixins import and the distribution lacks is an empty class.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEADLINE = 1800
"""Seconds for one suite."""

COLLECTOR = """
import json

FOUND = {}

def pytest_collectreport(report):
    if report.skipped:
        note(report)

def pytest_runtest_logreport(report):
    note(report)

def note(report):
    found = FOUND.setdefault(report.nodeid, {"outcome": "passed", "reasons": [], "skip": None})
    record = getattr(report, "cudaenv", None) or {}
    if report.outcome == "failed" or report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        found["outcome"] = report.outcome
    if report.outcome == "skipped":
        found["reasons"] = record.get("reasons") or []
        found["skip"] = record.get("skip")

def pytest_sessionfinish():
    with open("outcomes.json", "w") as file:
        json.dump(FOUND, file)
"""

DRIVER = """
import unittest

import torch
from transformers import (
    BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel,
    MixtralConfig, MixtralForCausalLM, MixtralModel, ViTConfig, ViTForImageClassification, ViTModel,
)

from ..generation.test_utils import GenerationTesterMixin
from ..test_modeling_common import ModelTesterMixin

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}


class Tester:
    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    image_size, patch_size, vocab_size, num_labels, num_choices = 30, 15, 99, 3, 4

    def __init__(self, parent, config, image=False):
        self.parent, self.config, self.image = parent, config, image

    def get_config(self):
        return type(self.config)(**self.config.to_dict())

    def prepare_config_and_inputs_for_common(self):
        if self.image:
            inputs = {"pixel_values": torch.rand(self.batch_size, 3, self.image_size, self.image_size)}
        else:
            ids = torch.randint(1, self.vocab_size, (self.batch_size, self.seq_length))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return self.get_config(), inputs

    def prepare_config_and_inputs_for_model_class(self, model_class):
        return self.prepare_config_and_inputs_for_common()


class LlamaTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (LlamaModel, LlamaForCausalLM)

    def setUp(self):
        self.model_tester = Tester(self, LlamaConfig(vocab_size=99, num_key_value_heads=2, pad_token_id=0, **SMALL))


class MixtralTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (MixtralModel, MixtralForCausalLM)

    def setUp(self):
        config = MixtralConfig(vocab_size=99, num_key_value_heads=2, num_local_experts=2, pad_token_id=0, **SMALL)
        self.model_tester = Tester(self, config)


class BertTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (BertModel, BertForMaskedLM, BertForSequenceClassification)

    def setUp(self):
        self.model_tester = Tester(self, BertConfig(vocab_size=99, pad_token_id=0, **SMALL))


class ViTTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (ViTModel, ViTForImageClassification)
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = Tester(self, ViTConfig(image_size=30, patch_size=15, **SMALL), image=True)
"""

LACKING = {
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
    "models/test_driver.py": DRIVER,
}

SUITES: dict[str, tuple[str, ...]] = {
    "transformers": (
        "tests/models/test_driver.py",
        "tests/test_executorch.py",
        "tests/test_image_transforms.py",
        "tests/test_monkey_patching.py",
    ),
    "accelerate": (
        "tests/test_accelerator.py",
        "tests/test_big_modeling.py",
        "tests/test_compile.py",
        "tests/test_cpu.py",
        "tests/test_fp8.py",
        "tests/test_grad_sync.py",
        "tests/test_hooks.py",
        "tests/test_kwargs_handlers.py",
        "tests/test_metrics.py",
        "tests/test_modeling_utils.py",
        "tests/test_multidevice.py",
        "tests/test_offload.py",
        "tests/test_optimizer.py",
        "tests/test_quantization.py",
        "tests/test_scheduler.py",
        "tests/test_tpu.py",
        "tests/test_tracking.py",
        "tests/test_utils.py",
    ),
    "peft": (
        "tests/test_common_gpu.py",
        "tests/test_gpu_examples.py",
        "tests/test_gptqmodel.py",
        "tests/test_quantization.py",
        "tests/test_torch_compile.py",
        "tests/test_lora_megatron.py",
        "tests/test_stablediffusion.py",
        "tests/test_integrations.py",
        "tests/test_target_parameters.py",
    ),
}


def main() -> None:
    """Print, for each suite, its skips by reason, and the share of `skip-unknown`."""
    chosen = [name for name in SUITES if name in sys.argv[1:]] or list(SUITES)
    folders = [argument for argument in sys.argv[1:] if argument not in SUITES]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(folders[0] if folders else temporary).resolve()
        everything: list[dict[str, Any]] = []
        for name in chosen:
            everything += run(name, unpacked(name, folder))
        report("all", everything)


def unpacked(name: str, folder: Path) -> Path:
    """The unpacked source distribution, of the version that is installed if it is."""
    try:
        wanted = f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        wanted = name
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    if not list(place.glob("*.tar.gz")):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-binary",
            ":all:",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run([*pip, "-d", str(place), wanted], check=True)
    (archive,) = place.glob("*.tar.gz")
    root = place / archive.name.removesuffix(".tar.gz")
    if not root.exists():
        with tarfile.open(archive) as file:
            file.extractall(place, filter="data")
    return root


def run(name: str, root: Path) -> list[dict[str, Any]]:
    """Run a suite's part; what became of each test."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        tests = place / "tests"
        _copied(root / "tests", tests, LACKING if name == "transformers" else {})
        (place / "suite_outcomes.py").write_text(COLLECTOR)
        (place / "pytest.ini").write_text("[pytest]\ncuda_adopt = transformers accelerate skipif\n")
        options = ["-q", "-p", "suite_outcomes", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout", "60"]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", ""), str(root / "src")]),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *SUITES[name]]
        try:
            done = subprocess.run(
                command, cwd=place, env=environ, capture_output=True, text=True, timeout=DEADLINE, check=False
            )
            print(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-2000:])
        except subprocess.TimeoutExpired:
            print(f"{name}: not finished after {DEADLINE} s")
        outcomes = place / "outcomes.json"
        found = list(json.loads(outcomes.read_text()).values()) if outcomes.exists() else []
    report(name, found)
    return found


def _copied(source: Path, target: Path, lacking: Mapping[str, str]) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for name, text in lacking.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()


def report(name: str, found: list[dict[str, Any]]) -> None:
    """Print one suite's figures."""
    outcomes = Counter(entry["outcome"] for entry in found)
    skipped = [entry for entry in found if entry["outcome"] == "skipped"]
    codes = Counter(tuple(sorted({r["code"] for r in entry["reasons"]})) or ("none",) for entry in skipped)
    unknown = [
        entry for entry in skipped if any(r["code"] == "skip-unknown" for r in entry["reasons"]) or not entry["reasons"]
    ]
    share = 100 * len(unknown) / len(skipped) if skipped else 0.0
    print(f"{name}: {dict(outcomes)}; of {len(skipped)} skips {len(unknown)} unknown: {share:.1f} %")
    for code, count in codes.most_common():
        print(f"  {count:5} {' '.join(code)}")
    for text, count in Counter(str(entry["skip"]) for entry in unknown).most_common(20):
        print(f"        {count:5} unknown: {text[:100]}")


if __name__ == "__main__":
    main()
