"""Pipeline parallelism: schedules of micro-batches as data, their validation and simulation, and their executor."""
