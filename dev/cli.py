"""The command line of `dev`: one thin function per command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from dev import images as image_builder
from dev import release, site
from dev import tools as go_tools
from dev.cluster import host
from dev.cluster.containerd import ensure_template
from dev.cluster.control_plane import ControlPlane, load, orphans
from dev.cluster.local import DEFAULT_NODES, NUMBERS, LocalCluster
from dev.cluster.node import GRACE_SECONDS
from dev.commands import exports, side_by_side
from dev.console import console, say
from dev.demo.kind import Kind
from dev.errors import DevError
from dev.paths import ROOT, clusters
from shoal import __version__

CONTROL_PLANE_FOLDER = "control-plane"


class _Commands(click.Group):
    """Prints a `DevError` without a traceback. Exit code 2, or 130 after Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DevError as error:
            console.print(f"[red]error:[/red] {error}", markup=True)
            ctx.exit(2)
        except subprocess.CalledProcessError as error:
            console.print(f"[red]error:[/red] {' '.join(map(str, error.cmd))}: {error.stderr or error}")
            ctx.exit(2)
        except KeyboardInterrupt:
            say("interrupted; `python -m dev down` removes the rest")
            ctx.exit(130)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """A real Kubernetes on this machine, the images, and the demo."""


def _cluster_option(function: Any) -> Any:
    return click.option(
        "--cluster", default="local", type=click.Choice(list(NUMBERS)), help="Which cluster."
    )(function)


@main.command()
@click.option("--for", "purpose", type=click.Choice(["control-plane", "nodes"]), default="nodes")
def tools(purpose: str) -> None:
    """Build Kubernetes, etcd, CoreDNS and helm; print their folder."""
    names = go_tools.CONTROL_PLANE if purpose == "control-plane" else go_tools.NODES
    click.echo(go_tools.ensure(names).folder)


@main.command()
def setup() -> None:
    """Build the Go tools and, as root on Linux, the images; install what the tests need."""
    if not host.is_root():
        go_tools.ensure()
        say("the images need root on Linux; the tests of the nodes tier are skipped")
        return
    host.prepare()
    host.prepare_browser()
    pause = go_tools.ensure(("pause",))
    side_by_side(lambda: image_builder.build(image_builder.DEMO, pause), go_tools.ensure)
    ensure_template([image_builder.IMAGES[name].reference for name in image_builder.DEMO])


@main.command()
def docs() -> None:
    """Build the documentation site; print its folder."""
    click.echo(site.build(ROOT / "build" / "site"))


@main.command()
@click.option("--control-plane", "only", is_flag=True, help="Without nodes; needs no root.")
@click.option("--image", "wanted", multiple=True, help="Images to load (built if missing).")
@_cluster_option
def up(only: bool, wanted: tuple[str, ...], cluster: str) -> None:
    """Bring up a cluster: a control plane, one on-demand and three spot nodes, DNS, storage."""
    if only:
        folder = clusters() / CONTROL_PLANE_FOLDER
        if (old := load(folder)) and old.processes.running("kube-apiserver"):
            raise DevError("A control plane is already running. Stop it with `python -m dev down`.")
        plane = ControlPlane(folder, go_tools.ensure(go_tools.CONTROL_PLANE))
        plane.stop()
        plane.launch()
        _print_environment(plane)
        return
    host.prepare()
    local = LocalCluster(cluster)
    if wanted:
        image_builder.build(wanted, go_tools.ensure())
    local.up(DEFAULT_NODES, [image_builder.IMAGES[name].reference for name in wanted])
    _print_environment(local.plane)


@main.command()
@_cluster_option
def down(cluster: str) -> None:
    """Stop and remove a cluster, and a control plane without nodes. Works after a crash, too."""
    if plane := load(clusters() / CONTROL_PLANE_FOLDER):
        plane.stop()
        say("the control plane is down")
    for orphan in (left := list(orphans())):
        orphan.stop()
        say(f"the control plane {orphan.folder.name}, left by a killed process, is down")
    if there := (clusters() / cluster).exists():
        LocalCluster(cluster).down()
        say(f"the cluster {cluster} is down")
    if in_kind := (kind := Kind()).kubeconfig.exists():
        kind.down()
        say("the cluster of kind is down")
    if not (plane or left or there or in_kind):
        say("no cluster is there")


@main.command()
def status() -> None:
    """Show the running control planes and nodes."""
    for name in NUMBERS:
        if not (clusters() / name).exists():
            continue
        local = LocalCluster(name)
        running = local.plane.processes.running("kube-apiserver")
        click.echo(f"{name}: control plane {'runs' if running else 'is down'} at {local.plane.server}")
        for node in local.nodes():
            kind = "spot" if node.spec.spot else "on-demand"
            click.echo(f"  {node.spec.name}  {kind}  {node.address}  {'runs' if node.alive else 'is dead'}")
        if running:
            _print_environment(local.plane)
    if plane := load(clusters() / CONTROL_PLANE_FOLDER):
        click.echo(f"control plane only: {plane.server}")
        _print_environment(plane)


@main.group()
def node() -> None:
    """Add and remove nodes."""


@node.command("add")
@click.argument("name")
@click.option("--spot", is_flag=True, help="Label it as a GKE spot node.")
@_cluster_option
def node_add(name: str, spot: bool, cluster: str) -> None:
    """Add a node and wait until it is Ready."""
    LocalCluster(cluster).add_nodes([(name, spot)])


@node.command("notice")
@click.argument("name")
@click.option(
    "--seconds", default=float(GRACE_SECONDS), help="Seconds from the notice to the end of the machine."
)
@_cluster_option
def node_notice(name: str, seconds: float, cluster: str) -> None:
    """Reclaim a node with notice: Ready=False "node is shutting down", SIGTERM, then SIGKILL."""
    LocalCluster(cluster).notice(name, seconds=seconds)


@node.command("kill")
@click.argument("name")
@_cluster_option
def node_kill(name: str, cluster: str) -> None:
    """Kill a node without notice."""
    LocalCluster(cluster).kill(name)


@main.group()
def images() -> None:
    """Build and load the images: operator, ps, worker, digits."""


_NAMES = click.argument("names", nargs=-1, type=click.Choice(list(image_builder.IMAGES)))


@images.command("build")
@_NAMES
def images_build(names: tuple[str, ...]) -> None:
    """Build the images that are not up to date."""
    for reference, digest in image_builder.build(
        names or image_builder.DEMO, go_tools.ensure(("pause",))
    ).items():
        click.echo(f"{reference}\t{digest}")


@images.command("load")
@_NAMES
@_cluster_option
def images_load(names: tuple[str, ...], cluster: str) -> None:
    """Build the images that are not up to date and load them into the nodes."""
    names = names or image_builder.DEMO
    image_builder.build(names, go_tools.ensure(("pause",)))
    references = [image_builder.IMAGES[name].reference for name in names]
    ensure_template(references)
    for reference in references:
        LocalCluster(cluster).load_image(reference)


@images.command("push")
@click.argument("registry")
@click.option("--tag", help="Default: the version and the commit.")
def images_push(registry: str, tag: str | None) -> None:
    """Build all images for REGISTRY with Docker or buildah, push them, print the `helm install` that uses them."""
    from dev.publish import publish

    click.echo(publish(registry, tag))


@main.group("release")
def release_group() -> None:
    """The steps of a release; .github/workflows/release.yaml runs them."""


@release_group.command("check")
@click.argument("tag")
def release_check(tag: str) -> None:
    """Refuse a tag that is not the version of package, chart and CHANGELOG.md."""
    release.check(tag)


@release_group.command("images")
def release_images() -> None:
    """Print the images to publish, as a matrix."""
    click.echo(release.matrix())


@release_group.command("notes")
def release_notes() -> None:
    """Print what CHANGELOG.md says about this version."""
    click.echo(release.notes(__version__))


@release_group.command("chart")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--registry", required=True, help="Where its images are.")
def release_chart(folder: Path, registry: str) -> None:
    """Package the chart with its images as defaults; print the archive."""
    click.echo(release.package_chart(folder, registry))


@release_group.command("wheel")
@click.argument("folder", type=click.Path(path_type=Path))
def release_wheel(folder: Path) -> None:
    """Build the Python package; print it."""
    click.echo(release.build_wheel(folder))


@release_group.command("plugin")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--os", "os_name", required=True, help="As krew names it.")
@click.option("--arch", required=True, help="As krew names it.")
def release_plugin(folder: Path, os_name: str, arch: str) -> None:
    """Build kubectl-shoal for this machine; print the archive."""
    click.echo(release.build_plugin(folder, os_name, arch))


@release_group.command("krew")
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--base", required=True, help="Where the archives will be.")
@click.option("--homepage", required=True, help="Of the project.")
def release_krew(folder: Path, base: str, homepage: str) -> None:
    """Write the manifest for krew of the archives in a folder; print it."""
    click.echo(release.krew_manifest(folder, base, homepage))


@main.command()
def demo() -> None:
    """Run a job while its nodes are reclaimed. CLUSTER=kind|local chooses the cluster, KEEP=1 keeps it.

    STORY=pools: the job is planned on pools of nodes that a played cloud makes and takes.
    """
    from dev import demo as stories

    sys.exit(stories.story(os.environ.get("STORY", "")))


def _print_environment(plane: ControlPlane) -> None:
    click.echo(exports(plane.env))
