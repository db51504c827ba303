"""The parts of `perf/compare`: `servers` starts what is measured, `load` measures it, `figures` are the measurements,
`tables` shows them."""
