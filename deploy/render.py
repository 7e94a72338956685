"""Renders the chart by Helm's own library, and checks what comes out against Kubernetes' schemas.

Reads {"chart": FOLDER, "versions": [KUBERNETES, ...], "jobs": {NAME: {"namespace": ..., "values": {...}}, ...}} from
standard input, and writes {NAME: {"manifests": TEXT, "problems": [...]}} or {NAME: {"error": TEXT}}.
"""

import json
import sys

import helm_python
import kubernetes_validate
import yaml


def render(chart, job):
    """One text as `helm template` prints it."""
    values, namespace = job.get("values", {}), job.get("namespace", "culvert-system")
    chart.validate_schema(values)
    files = chart.render(values, name="culvert", namespace=namespace, is_install=True)
    parts = []
    # What the others are made in comes first, as in an installation.
    for path in sorted(files, key=lambda path: (not path.endswith("/namespace.yaml"), path)):
        text = files[path].strip()
        if path.endswith(".yaml") and any(yaml.safe_load_all(text)):
            parts.append(f"---\n# Source: {path}\n{text.removeprefix('---').strip()}\n")
    return "".join(parts)


def problems(text, versions):
    """What Kubernetes of each version would refuse; unknown fields, too."""
    for document in filter(None, yaml.safe_load_all(text)):
        for version in versions:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                where = ".".join(str(step) for step in error.path)
                yield f"{version}: {document['kind']}/{document['metadata']['name']} {where}: {error.message}"


def main():
    wanted = json.load(sys.stdin)
    results = {}
    with helm_python.Chart.load(wanted["chart"]) as chart:
        for name, job in wanted["jobs"].items():
            try:
                text = render(chart, job)
            except helm_python.HelmError as error:
                results[name] = {"error": str(error)}
            else:
                results[name] = {"manifests": text, "problems": list(problems(text, wanted["versions"]))}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
