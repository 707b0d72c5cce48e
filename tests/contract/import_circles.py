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
        found = sorted(sorted(circle) for circle in circles if len(circle) > 1)
        links = [
            [
                (importer, detail["line_number"], imported)
                for importer in circle
                for imported in sorted(graph.find_modules_directly_imported_by(importer))
                if imported in circle
                for detail in graph.get_import_details(importer=importer, imported=imported)
            ]
            for circle in found
        ]
        return ContractCheck(kept=not found, metadata={"circles": found, "links": links})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each cycle's modules, and the lines whose imports close it."""
        for circle, links in zip(check.metadata["circles"], check.metadata["links"], strict=True):
            output.print_error(f"A circle of {len(circle)} modules: {', '.join(circle)}")
            for importer, line, imported in links:
                output.print_error(f"- {importer} -> {imported} (l.{line})", bold=False)
            output.new_line()
