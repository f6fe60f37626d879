"""What the verdict costs: the witness and parity as ratios to a bare forward, and the guard of torch's global state.

python -m benchmarks verdict                      # minutes: the honest sweep goes over 50 seeds
python -m benchmarks verdict --seeds 2
"""

from __future__ import annotations

from benchmarks import verdict_parity, verdict_state, verdict_witness


def main() -> None:
    """Print all three."""
    verdict_witness.main()
    verdict_state.main()
    verdict_parity.main()


if __name__ == "__main__":
    main()
