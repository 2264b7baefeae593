"""What ships to a device: a session loop that downloads graphs, runs them over local examples and uploads one vector.

It contains no algorithm and no tensor library: a new algorithm reaches a device as data, never as an update of the app.
"""
