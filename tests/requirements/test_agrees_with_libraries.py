"""Our tables against the libraries that they describe, where those are installed, asked in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv.host.catalog import CATALOG
from pytest_cudaenv.host.software import TorchBuild, installed_software
from pytest_cudaenv.requirements import attention, hub_kernels, precision, quantization, torch_build
from pytest_cudaenv.requirements.capability import runs_on
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.kernel_builds import Build

COMMIT = "b" * 40


def ask(code: str, **environ: str) -> Any:
    """What a fresh Python prints, as JSON, when it runs this."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "KERNELS_", "LOCAL_KERNELS"))} | environ
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def installed(*modules: str) -> pytest.MarkDecorator:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


ASK_TORCH = """
import json, torch, torch.cuda as c
print(json.dumps({
    "version": torch.__version__,
    "codes": {code: [cc for cc in %r if cc in rule] for code, rule in getattr(c, "DEVICE_REQUIREMENT", {}).items()},
    "releases": {
        cuda: {m: sorted(s) for m, s in by.items()}
        for cuda, by in getattr(c, "PYTORCH_RELEASES_CODE_CC", {}).items() if hasattr(by, "items")
    },
    "dtypes": [n for n in %r if isinstance(getattr(torch, n, None), torch.dtype)],
}))
"""


@installed("torch")
def test_torch() -> None:
    capabilities = sorted({k.capability for k in CATALOG.values()} | {(5, 2), (5, 3), (6, 2), (10, 1)})
    numbers = [10 * major + minor for major, minor in capabilities]
    told = ask(ASK_TORCH % (numbers, list(precision.DTYPES)))
    if tuple(map(int, told["version"].split(".")[:2])) < torch_build.RELEASES_SINCE:
        pytest.skip(f"torch {told['version']} has no such tables")
    ours = {code: [10 * a + b for a, b in capabilities if runs_on(f"sm_{code}", (a, b))] for code in told["codes"]}
    assert ours == told["codes"]
    releases = {(cuda, m): tuple(f"sm_{c}" for c in s) for cuda, by in told["releases"].items() for m, s in by.items()}
    assert dict(torch_build.RELEASES) == releases
    assert set(told["dtypes"]) == set(precision.DTYPES) - precision.FORMATS


ASK_TRANSFORMERS = """
import json
import transformers.modeling_flash_attention_utils as fa
from transformers import PreTrainedModel
from transformers.utils import import_utils
from transformers.utils.quantization_config import QuantizationMethod
print(json.dumps({
    "fallback": fa.FLASH_ATTN_KERNEL_FALLBACK,
    "versions": fa.FLASH_ATTN_KERNEL_VERSIONS,
    "methods": [m.value for m in QuantizationMethod],
    "flags": [f for f in %r if hasattr(PreTrainedModel, f)],
    "bounds": [import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION],
    "available": import_utils.is_kernels_available(),
}))
"""


@installed("torch", "transformers")
def test_transformers() -> None:
    flags = sorted({b.model_flag for b in attention.BACKENDS.values() if b.model_flag})
    told = ask(ASK_TRANSFORMERS % flags)
    have = installed_software()
    for name, repo in told["fallback"].items():
        assert attention.BACKENDS[name].kernel == repo
        assert attention._kernel_version(repo, have) == told["versions"][repo]
    assert told["flags"] == flags
    assert set(told["methods"]) <= set(quantization.METHODS)
    assert hub_kernels.accepted_versions(have) == tuple(told["bounds"])
    assert (hub_kernels.usability_reasons(have) == []) is told["available"]


ASK_KERNELS = """
import json, kernels
def loads(**where):
    try: return bool(kernels.get_kernel("demo-org/demo", **where))
    except (ValueError, FileNotFoundError): return False
print(json.dumps([loads(**w) for w in %r]))
"""


@installed("torch", "kernels")
@pytest.mark.parametrize("layout", ["kernels", "models"])
def test_what_is_at_hand_is_what_kernels_loads_offline(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{layout}--demo-org--demo"
    build = folder / "snapshots" / COMMIT / "build" / "torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("")
    facts = {"name": "demo", "id": "demo", "version": 1, "license": "x", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps({**facts, "backend": {"type": "cpu"}}))
    (folder / "refs").mkdir()
    for ref in ("v1", "main"):
        (folder / "refs" / ref).write_text(COMMIT)
    environ = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    where = [{"version": 1}, {"version": 2}, {"revision": "main"}, {"revision": COMMIT}, {"revision": "gone"}]
    have = hub_kernels.Software(torch=TorchBuild("2.13.0+cpu"), environ=environ)
    ours = [hub_kernels.is_at_hand(HubKernel("demo-org/demo", **w), have) for w in where]  # type: ignore[arg-type]
    assert ours == ask(ASK_KERNELS % where, **environ)


VARIANTS = [
    f"{framework}-{backend}-{machine}-linux"
    for framework in ("torch213-cxx11", "torch213", "torch212-cxx11", "torch-stable-abi29", "torch-stable-abi299")
    for backend in ("cpu", "cu126", "cu130", "rocm64")
    for machine in ("x86_64", "aarch64")
] + ["torch-cpu", "torch-cuda", "torch-rocm", "torch-universal"]

ASK_VARIANTS = """
import json, kernels, torch
from kernels.variants import VariantAccepted, parse_variant, resolve_variants
_, trace = resolve_variants([parse_variant(v) for v in %r])
accepted = [d.variant.variant_str for d in trace if isinstance(d, VariantAccepted)]
print(json.dumps([torch.__version__, torch.version.cuda, accepted]))
"""


@installed("torch", "kernels")
def test_builds_that_fit_are_those_that_kernels_takes() -> None:
    version, cuda, accepted = ask(ASK_VARIANTS % VARIANTS)
    ours = [v for v in VARIANTS if Build(v).fits(TorchBuild(version, cuda))]
    assert sorted(ours) == sorted(accepted)


@installed("torch", "transformers")
def test_the_guide_names_decorators_that_exist() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "moving_from_transformers.md").read_text()
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 25
    code = "import json, transformers.testing_utils as t; print(json.dumps([n for n in {} if not hasattr(t, n)]))"
    assert ask(code.format(names)) == []
