"""`lastgasp manager`: TaskD's manager for this job."""

from __future__ import annotations

import os

import click

EPILOG = """
\b
Examples:
  lastgasp manager                              on the pod of rank 0, sizes from the operator's environment
  lastgasp manager --nodes 8 --procs-per-node 8
  lastgasp manager --dry-run
"""


@click.command(epilog=EPILOG)
@click.option("--nodes", type=int, help="Pods of the job; default from WORLD_SIZE or MS_WORKER_NUM.")
@click.option("--procs-per-node", type=int, help="Ranks of each; default LOCAL_WORLD_SIZE or MS_LOCAL_WORKER.")
@click.option("--dry-run", is_flag=True, help="Show its configuration, and exit.")
def manager(nodes: int | None, procs_per_node: int | None, dry_run: bool) -> None:
    """Run MindCluster TaskD's manager until it is stopped; no manager.py is needed.

    `lastgasp run` starts one automatically on the pod of rank 0. With TASKD_PROCESS_ENABLE=off (pod rescheduling alone)
    it runs no MindIO controller.
    """
    from lastgasp.backends.ascend.manager import manager_config, run_manager

    config = manager_config(os.environ, nodes, procs_per_node)
    if dry_run:
        address = os.environ.get("POD_IP") or "127.0.0.1"
        port = os.environ.get("TTP_PORT", "")
        controller = f"MindIO controller at port {port}" if config.controls else "no MindIO controller"
        workers = f"{config.nodes} pods of {config.per_node} ranks"
        click.echo(f"job {config.job}: {workers}, at {address}:9601, {controller}")
        return
    run_manager(config)
