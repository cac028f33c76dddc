"""What runs in a replica's job: stages the model, starts the engine, lets gateways alone reach it, says how it is."""
