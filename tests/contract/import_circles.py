"""A contract of import-linter: no module imports itself, directly or through others.

Late and type-only imports count: a circle that Python gets away with is one all the same.
`acyclic_siblings`, which import-linter has, compares packages; this compares modules.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class NoCirclesContract(Contract):
    """No options: all modules of the root packages."""

    type_name = "no_circles"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find cycles: modules that each import all of the others, directly or not."""
        circles = {
            frozenset(graph.find_upstream_modules(module) & graph.find_downstream_modules(module))
            | {module}
            for module in graph.modules
        }
        links = [
            f"{importer} -> {imported} (l.{detail['line_number']})"
            for circle in circles if len(circle) > 1
            for importer in circle
            for imported in graph.find_modules_directly_imported_by(importer) & circle
            for detail in graph.get_import_details(importer=importer, imported=imported)
        ]  # fmt: skip
        return ContractCheck(kept=not links, metadata={"links": sorted(links)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports that are part of a cycle, with their lines."""
        for link in check.metadata["links"]:
            output.print_error(f"- {link}", bold=False)
