"""`python -m benchmarks [NAMES]`: run them one after another, print tables, write JSON."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

import click

from benchmarks import publish as readme
from benchmarks.harness import Options, run, write

NAMES = (
    "detect", "callback", "checkpoint", "restart", "warm", "in_place", "in_place_lightning", "in_place_megatron",
    "marks", "flush", "marks_step", "slow", "megatron", "mindspore", "mindio_drop_in", "report", "scale", "sizes",
    "arenas", "elastic",
)  # fmt: skip


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[NAMES]...")
@click.option("--quick", is_flag=True, help="A few seconds each, to see that they work; the numbers mean nothing.")
@click.option(
    "--json", "json_dir", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench"),
    show_default=True, help="Where NAME.json goes.",
)  # fmt: skip
@click.option(
    "--dir", "scratch", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where checkpoints are written; on the disk to be measured [the system's temporary directory].",
)  # fmt: skip
@click.option("--publish", is_flag=True, help="Also put the numbers into benchmarks/results and the documents.")
def main(names: tuple[str, ...], quick: bool, json_dir: Path, scratch: Path | None, publish: bool) -> None:
    """Measure NAMES (all by default).

    They are: detect, callback, checkpoint, restart, warm, in_place, in_place_lightning, in_place_megatron, marks,
    flush, marks_step, slow, megatron, mindspore, mindio_drop_in, report, scale, sizes,
    arenas, elastic.
    """
    if publish and quick:
        raise click.UsageError("--publish with --quick: the numbers of a quick run mean nothing.")
    for name in names or NAMES:
        bench = importlib.import_module(f"benchmarks.bench_{name}").measure
        with tempfile.TemporaryDirectory(dir=scratch, prefix=f"lastgasp-bench-{name}-") as folder:
            document = run(name, bench, Options(quick=quick, folder=Path(folder)))
        click.echo(f"written: {write(document, json_dir)}")
        if publish:
            write(document, readme.RESULTS)
            readme.publish()


if __name__ == "__main__":
    main()
