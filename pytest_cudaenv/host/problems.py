"""Why devices that are here cannot be used: every code, what was found and what a user can do about it."""

from __future__ import annotations

from pytest_cudaenv.host.devices import Problem

PROBLEMS: dict[str, Problem] = {
    problem.code: problem
    for problem in (
        Problem(
            "nvml-missing",
            "device nodes without libraries",
            "Install the NVIDIA driver's libraries; in a container, start it with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        ),
        Problem(
            "nvml-mismatch",
            "NVML of another driver version",
            "The driver was updated under a running kernel module: reboot, or unload and reload the nvidia kernel "
            "module.",
        ),
        Problem(
            "nvml-permission",
            "NVML, which refuses permission",
            "Give this user access to /dev/nvidia*; in a container or a batch job, ask for the GPU.",
        ),
        Problem(
            "nvml-too-old",
            "an NVML that is too old",
            "Update the NVIDIA driver.",
        ),
        Problem(
            "nvml-unknown",
            "an NVML that does not answer",
            "See what `nvidia-smi` says; a container whose host ran `systemctl daemon-reload` must be restarted.",
        ),
        Problem(
            "driver-not-loaded",
            "a driver that is not loaded",
            "Load it with `modprobe nvidia`; in a container, start it with `--gpus all`.",
        ),
        Problem(
            "gpu-lost",
            "a GPU that fell off the bus",
            "Look for Xid messages in `dmesg`, and reboot the machine.",
        ),
        Problem(
            "gpu-reset-required",
            "a GPU that must be reset",
            "Reset it with `nvidia-smi --gpu-reset`, or reboot the machine.",
        ),
        Problem(
            "gpu-missing",
            "a device node without its GPU",
            "See what `nvidia-smi` says and look for Xid messages in `dmesg`; in a container, restart it.",
        ),
        Problem(
            "gpu-no-uuid",
            "a GPU without UUID",
            "See what `nvidia-smi -L` says; without a UUID a GPU can't be granted to one test only.",
        ),
        Problem(
            "mig-empty",
            "MIG mode without instances",
            "Create instances with `nvidia-smi mig -cgi PROFILE -C`, or switch MIG off with `nvidia-smi -mig 0`.",
        ),
        Problem(
            "detection-failed",
            "a search for it that failed",
            "Run `pytest-cudaenv doctor`, and report what it says as a bug.",
        ),
    )
}
"""Every problem by its code. `have` is at most 32 characters: it ends the reason of every test that needs a device."""
