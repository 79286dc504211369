"""The modules of public names that few programs use: they are imported when one is asked for."""

LATER = {
    "allocate": ".budget",
    "distill": ".learning",
    "Evaluation": ".evaluation",
    "evaluate": ".evaluation",
    "merge": ".merging",
    "parallelize": ".parallel",
    "Refine": ".learning",
    "refine": ".learning",
    "smooth": ".smoothing",
    "trace": ".graph.export",
}
