"""The two all-to-alls of a Muon step, and the checks by which ranks agree before anything is sent."""
