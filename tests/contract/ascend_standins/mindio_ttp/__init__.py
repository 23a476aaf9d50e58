"""Stand-in for MindCluster's `mindio_ttp` 7.3, after mindio_tft.md; written from those notes, not from its code.

It keeps the contract's types, threads, order, blocking and ways to fail, over real sockets between real processes.
What the real package would refuse, ignore or hang on is also written to the file `MINDIO_STANDIN_VIOLATIONS`, which
a test asserts to be empty. What happened stands in `MINDIO_STANDIN_TRACE`, one JSON object a line.

Times are the real ones times `MINDIO_STANDIN_SCALE`; the 10 s before `os._exit(2)` are `MINDIO_STANDIN_EXIT_WAIT`.
`MINDIO_STANDIN_START=fail` makes `tft_start_controller` end as on any failure, `MINDIO_STANDIN_DESTROY=hang` makes
`tft_destroy_processor` wait for ever (§16.1).
"""
