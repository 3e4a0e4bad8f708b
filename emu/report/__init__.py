"""Recording a run and showing it. Owns every file of an output directory but its name.

While the run goes on (all synchronous, called by `emu/cluster/recorder.py`):

    records      RequestLog         requests.csv, latencies
    itl          GapLog             gaps between tokens
    runfiles     TransitionLog, MarkLog     transitions.csv, marks.csv
    csvtext      TimeseriesWriter, ReplicaSeries    timeseries.csv, replicas.csv
    trace        TraceWriter        trace.json.gz
    atomic       RunDirectory       the staging directory that becomes the result

At the end, and later from the files alone:

    summary      build_summary, write_summary, read_summary
    runfiles     write_gaps, read_gaps      itl.json
    table        print_summary      a terminal's tables
    html         write_report       report.html
    compare      compare_runs       two to ten runs side by side
                 compare_measured   a run against a real server's measurements

Packages below import none of this; they call back through the cluster.
"""
