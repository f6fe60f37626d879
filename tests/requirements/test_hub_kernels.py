"""Kernels from the Hub: usable pairs, what is at hand, and what was reported of them (T20)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fabricated_hosts import codes, device, software

from pytest_cudaenv.host.software import Software
from pytest_cudaenv.requirements import attention, hub_kernels
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.kernel_builds import Build, cache_folder, is_offline
from pytest_cudaenv.requirements.reason import Rank

PAIR = {"kernels": "0.17.2", "transformers": "5.22.2"}
COMMIT = "a" * 40
FLASH2 = HubKernel("kernels-community/flash-attn2", version=4)


def add_build(folder: Path, variant: str = "torch-cuda", archs: tuple[str, ...] = (), kind: str = "cuda") -> None:
    """One variant of a kernel, with metadata as builders write it."""
    (folder / variant).mkdir(parents=True)
    backend = {"type": kind, **({"archs": list(archs)} if archs else {})}
    (folder / variant / "metadata.json").write_text(json.dumps({"name": "demo", "backend": backend}))


def add_to_cache(cache: Path, repo: str, ref: str, *variants: str, archs: tuple[str, ...] = ()) -> None:
    """A kernel in the cache, under one ref, in the layout of kernels 0.17."""
    folder = cache / f"kernels--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(COMMIT)
    for variant in variants:
        add_build(folder / "snapshots" / COMMIT / "build", variant, archs)


def offline(cache: Path, torch: str = "2.13.0+cu130", **environ: str) -> Software:
    return software(PAIR, torch=torch, environ={"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **environ})


@pytest.mark.parametrize("repo", ["name", "a/b/c", "", "org/", "org name/x", "org/name:fn", None])
def test_repositories_are_checked(repo: str) -> None:
    with pytest.raises(ValueError, match="org/name"):
        HubKernel(repo)


def test_version_and_revision_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="not both"):
        HubKernel("org/name", version=1, revision="main")
    with pytest.raises(ValueError, match="whole number"):
        HubKernel("org/name", version="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernels", "transformers", "expected"),
    [
        (None, "5.22.2", ["kernels-missing"]),
        ("0.17.2", "5.22.2", []),
        ("0.17.1", "5.22.2", ["kernels-version"]),
        ("0.18.0.dev0", "5.22.2", []),
        ("0.18.0", "5.22.2", ["kernels-version"]),
        ("0.17.2", "5.24.0", ["kernels-version"]),
        ("0.18.2", "5.24.0", []),
        ("0.16.0", "5.16.1", []),
        ("0.17.0", "5.16.1", ["kernels-version"]),
        ("unknown", "5.24.0", ["kernels-version"]),
        ("0.17.2", None, []),
        ("0.17.2", "5.99.0", []),
    ],
)
def test_pairs(kernels: str | None, transformers: str | None, expected: list[str]) -> None:
    versions = {"kernels": kernels, "transformers": transformers}
    found = software({name: version for name, version in versions.items() if version})
    assert codes(hub_kernels.pair_reasons(found)) == expected


def test_what_a_wrong_pair_says() -> None:
    [reason] = hub_kernels.pair_reasons(software({"kernels": "0.17.2", "transformers": "5.24.0"}))
    assert str(reason) == "[kernels-version] transformers needs kernels>=0.18.2,<0.19; have 0.17.2"
    assert "pip install 'kernels>=0.18.2,<0.19'" in reason.remedy


def test_the_installed_transformers_tells_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers" / "utils").mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('never imported')")
    bounds = 'KERNELS_MIN_VERSION = "0.30.0"\nKERNELS_MAX_VERSION = "0.31.0"\n'
    (tmp_path / "transformers" / "utils" / "import_utils.py").write_text(bounds)
    (tmp_path / "transformers-7.0.0.dist-info").mkdir()
    (tmp_path / "transformers-7.0.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 7.0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hub_kernels._told_by_installed.cache_clear()
    try:
        assert hub_kernels.accepted_versions(software({"transformers": "7.0.0"})) == ("0.30.0", "0.31.0")
        assumed = software().assuming({"transformers": "7.0.0"})
        assert hub_kernels.accepted_versions(assumed) is None
    finally:
        hub_kernels._told_by_installed.cache_clear()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, []),
        ({"USE_HUB_KERNELS": "yes"}, []),
        ({"USE_HUB_KERNELS": "0"}, ["kernels-off"]),
        ({"USE_HUB_KERNELS": "auto"}, ["kernels-off"]),
        ({"DISABLE_KERNEL_MAPPING": "0"}, []),
        ({"DISABLE_KERNEL_MAPPING": "1"}, ["kernels-off"]),
        ({"DISABLE_KERNEL_MAPPING": "true"}, ["kernels-broken"]),
        ({"USE_HUB_KERNELS": "off", "DISABLE_KERNEL_MAPPING": "1"}, ["kernels-off", "kernels-off"]),
    ],
)
def test_kernels_turned_off(environ: dict[str, str], expected: list[str]) -> None:
    reasons = hub_kernels.pair_reasons(software(PAIR, environ=environ))
    assert codes(reasons) == expected
    assert len(set(reasons)) == len(expected)


def test_krn1_offline_and_not_cached(tmp_path: Path) -> None:
    """https://github.com/huggingface/kernels/issues/553"""
    [reason] = hub_kernels.software_reasons(FLASH2, offline(tmp_path))
    assert str(reason) == "[kernels-offline] needs kernel flash-attn2; have offline, not cached"
    assert 'revision="v4"' in reason.remedy
    assert not hub_kernels.is_at_hand(FLASH2, offline(tmp_path))


def test_krn1_offline_and_cached(tmp_path: Path) -> None:
    add_to_cache(tmp_path, FLASH2.repo, "v4", "torch-cuda")
    found = offline(tmp_path)
    assert hub_kernels.software_reasons(FLASH2, found) == []
    assert hub_kernels.is_at_hand(FLASH2, found)
    assert hub_kernels.is_at_hand(HubKernel(FLASH2.repo), found)
    assert hub_kernels.is_at_hand(HubKernel(FLASH2.repo, revision=COMMIT), found)
    for absent in (HubKernel(FLASH2.repo, version=3), HubKernel(FLASH2.repo, revision="main")):
        assert codes(hub_kernels.software_reasons(absent, found)) == ["kernels-offline"]


def test_online_and_not_cached_can_be_downloaded(tmp_path: Path) -> None:
    assert hub_kernels.software_reasons(FLASH2, software(PAIR, environ={"HF_HUB_CACHE": str(tmp_path)})) == []


def test_a_version_in_the_old_layout_does_not_load(tmp_path: Path) -> None:
    add_to_cache(tmp_path, FLASH2.repo, "v4", "torch-cuda")
    (tmp_path / "kernels--kernels-community--flash-attn2").rename(tmp_path / "models--kernels-community--flash-attn2")
    assert codes(hub_kernels.software_reasons(FLASH2, offline(tmp_path))) == ["kernels-offline"]


def test_krn2_no_build_for_this_torch(tmp_path: Path) -> None:
    """https://github.com/huggingface/kernels-community/issues/1082"""
    add_to_cache(tmp_path, FLASH2.repo, "v4", "torch29-cxx11-cu128-x86_64-linux", "torch212-cxx11-cu130-x86_64-linux")
    [reason] = hub_kernels.software_reasons(FLASH2, offline(tmp_path))
    assert (reason.code, reason.rank) == ("kernels-variant", Rank.MISSING)
    assert reason.need == "flash-attn2 needs a build for torch 2.13"
    assert "torch212-cxx11-cu130-x86_64-linux, torch29-cxx11-cu128-x86_64-linux" in reason.remedy


LOOK = """
import socket, sys
def refuse(*args): raise AssertionError("network while collecting")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.mask import read_mask
from pytest_cudaenv.host.software import installed_software
from pytest_cudaenv.requirements import requirement as r
assert not {"packaging", "torch", "pynvml", "_pytest"} & set(sys.modules), "imported at start-up"
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.quantization import METHODS
from pytest_cudaenv.requirements.attention import BACKENDS
wanted = r.Requirement(
    devices=1, attn_backends=(*BACKENDS, "kernels-community/flash-attn3"), hub_kernels=(HubKernel("org/name"),),
    needs_kernels=True, quantization=tuple(METHODS), packages=("torch>=2", "kernels"), nccl=True, dtypes=("bfloat16",),
)
host = simulated_host("h100", installed_software())
reasons = r.unmet(wanted, host, read_mask(None, None, host.devices))
assert reasons
heavy = {"torch", "transformers", "kernels", "huggingface_hub", "flash_attn", "pynvml"} & set(sys.modules)
assert not heavy, heavy
"""


def test_krn3_nothing_is_downloaded_or_imported_to_decide() -> None:
    """https://github.com/huggingface/transformers/blob/main/src/transformers/testing_utils.py (require_flash_attn)"""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_local_kernels(tmp_path: Path) -> None:
    add_build(tmp_path / "repo" / "build", "torch-universal", kind="cpu")
    kernel = HubKernel("org/name", version=7)
    for path in ("repo", "repo/build", "repo/build/torch-universal"):
        found = software(PAIR, environ={"LOCAL_KERNELS": f"a/b=/x:org/name={tmp_path / path}"})
        assert hub_kernels.is_at_hand(kernel, found)
        assert hub_kernels.software_reasons(kernel, found) == []
    assert not hub_kernels.is_at_hand(HubKernel("org/other"), found)


@pytest.mark.parametrize("value", ["", "org/name", "org/name=/p:", "org/name=/nowhere/at/all"])
def test_local_kernels_that_fail_at_every_load(value: str) -> None:
    [reason] = hub_kernels.software_reasons(HubKernel("org/name"), software(PAIR, environ={"LOCAL_KERNELS": value}))
    assert (reason.code, reason.rank) == ("kernels-local", Rank.BROKEN)


@pytest.mark.parametrize(
    ("archs", "key", "expected"),
    [
        (("8.0", "9.0a"), "a10g", []),
        (("8.0", "9.0a"), "h100", []),
        (("8.0", "9.0a"), "b200", ["kernels-arch"]),
        (("8.0",), "orin", ["kernels-arch"]),
        (("10.0f",), "b300", []),
        (("10.0a",), "b300", ["kernels-arch"]),
        (("9.0+PTX",), "rtx5090", []),
        (("7.5", "gfx90a"), "p100", []),
        ((), "p100", []),
    ],
)
def test_archs_of_the_build_at_hand(tmp_path: Path, archs: tuple[str, ...], key: str, expected: list[str]) -> None:
    add_to_cache(tmp_path, FLASH2.repo, "v4", "torch-cuda", archs=archs)
    assert codes(hub_kernels.device_reasons(FLASH2, device(key), offline(tmp_path))) == expected


def test_only_builds_that_fit_this_torch_count(tmp_path: Path) -> None:
    build = tmp_path / "kernels--org--name" / "snapshots" / COMMIT / "build"
    add_build(build, "torch212-cxx11-cu130-x86_64-linux", ("9.0",))
    add_build(build, "torch-stable-abi29-cu126-x86_64-linux", ("8.0",))
    add_build(build, "torch-stable-abi29-cu130-x86_64-linux", ("8.6",))
    found = software(PAIR, torch="2.13.0+cu130", environ={"HF_HUB_CACHE": str(tmp_path)})
    assert hub_kernels.declared_archs(HubKernel("org/name"), found) in {("8.6",), ()}  # (): not on x86-64 Linux


@pytest.mark.parametrize(
    ("variant", "torch", "expected"),
    [
        ("torch-universal", "2.13.0+cpu", True),
        ("torch-cpu", "2.13.0+cpu", True),
        ("torch-cpu", "2.13.0+cu130", False),
        ("torch-cuda", "2.13.0+cu130", True),
        ("torch-cuda", "2.13.0+rocm6.4", False),
        ("torch29-cxx11-cu128-riscv64-linux", "2.9.0+cu128", False),
        ("nonsense", "2.13.0+cpu", None),
        ("torch-cuda", None, None),
    ],
)
def test_variants(variant: str, torch: str | None, expected: bool | None) -> None:
    assert Build(variant).fits(software(torch=torch).torch) is expected


def test_a_cached_kernel_stands_in_for_a_missing_package(tmp_path: Path) -> None:
    name, repo = "flash_attention_3", "kernels-community/vllm-flash-attn3"
    assert codes(attention.software_reasons(name, offline(tmp_path), None)) == ["attn-missing"]
    add_to_cache(tmp_path, repo, "v1", "torch-cuda", archs=("8.0", "9.0a"))
    found = offline(tmp_path)
    assert attention.software_reasons(name, found, None) == []
    assert attention.device_reasons(name, "bfloat16", device("a10g"), found) == []
    [reason] = attention.device_reasons(name, "bfloat16", device("rtx5090"), found)
    assert str(reason) == "[kernels-arch] vllm-flash-attn3 needs sm_80/90a; have 12.0 (RTX 5090)"
    assert codes(attention.device_reasons(name, "bfloat16", None, found)) == ["attn-device"]


def test_the_stand_in_needs_a_usable_pair(tmp_path: Path) -> None:
    add_to_cache(tmp_path, "kernels-community/vllm-flash-attn3", "v1", "torch-cuda")
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    wrong = software({"kernels": "0.17.2", "transformers": "5.24.0"}, environ=environ)
    assert codes(attention.software_reasons("flash_attention_3", wrong, None)) == ["attn-missing"]
    # These switch off replaced layers, and not this way (measured).
    switches = {"USE_HUB_KERNELS": "0", "DISABLE_KERNEL_MAPPING": "1"}
    assert attention.software_reasons("flash_attention_3", software(PAIR, environ=environ | switches), None) == []


def test_a_stand_in_without_archs_keeps_the_rule_of_its_algorithm(tmp_path: Path) -> None:
    add_to_cache(tmp_path, "kernels-community/flash-attn4", "v0", "torch-cuda")
    reasons = attention.device_reasons("flash_attention_4", None, device("a100"), offline(tmp_path))
    assert codes(reasons) == ["attn-capability"]


def test_the_stand_in_for_fa2_runs_on_the_cpu_if_it_is_built_for_it(tmp_path: Path) -> None:
    add_to_cache(tmp_path, FLASH2.repo, "v4", "torch-cpu")
    on_cpu = offline(tmp_path, torch="2.13.0+cpu")
    assert attention.software_reasons("flash_attention_2", on_cpu, None) == []
    assert attention.device_reasons("flash_attention_2", "bfloat16", None, on_cpu) == []
    with_cuda = offline(tmp_path, torch="2.13.0+cu130")
    assert codes(attention.device_reasons("flash_attention_2", "bfloat16", None, with_cuda)) == ["attn-device"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HOME": "/h", "HF_HOME": "~/hf"}, "/h/hf/hub"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/hf"}, "/c"),
        ({"KERNELS_CACHE": "/k", "HF_HUB_CACHE": "/c"}, "/k"),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], expected: str | None) -> None:
    assert cache_folder(environ) == (Path(expected) if expected else None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"HF_HUB_OFFLINE": "1"}, True),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, False),
        ({"TRANSFORMERS_OFFLINE": "yes"}, True),
        ({"HF_HUB_OFFLINE": "2"}, False),
    ],
)
def test_who_is_offline(environ: dict[str, str], expected: bool) -> None:
    assert is_offline(environ) is expected
