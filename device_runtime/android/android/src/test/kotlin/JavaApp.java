package com.example;

import android.content.Context;
import dev.muster.device.*;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;

/** The library as an app in Java uses it. */
public final class JavaApp {
    public final Muster muster;
    public volatile String said = "";
    public volatile int entries = -1;

    public JavaApp(Context context) {
        muster =
            Muster.builder(context)
                .coordinator("http://127.0.0.1:9", "phones")
                .policy(Policy.of("{\"per_day\": {\"sessions\": 4}, \"min_cohort\": 2}"))
                .labels(Collections.singletonMap("app_version", "3.2.1"))
                .requirements(new Requirements(false, false, false))
                .attester(new KeyAttestation())
                .every(60)
                .warn(words -> said = words)
                .allowMainThread()
                .build();
    }

    public int keep(float[] picture, int digit) {
        ExampleField x = new ExampleField("x", DType.FLOAT32, Arrays.asList(1, picture.length));
        ExampleField y = new ExampleField("y", DType.INT64, Collections.emptyList(), 10L);
        muster.getExamples().declare("default", Arrays.asList(x, y), new Retention(30 * 86_400.0, 1000));
        try {
            muster.getExamples().append("default", Map.of("x", picture, "y", digit));
        } catch (DeviceException error) {
            said = error.getReason();
        }
        return muster.getExamples().counts().getOrDefault("default", 0);
    }

    public Outcome train() throws Exception {
        try (AutoCloseable outcomes = muster.listen(outcome -> said = outcome.getReason());
            AutoCloseable progress = muster.listenToProgress((Progress now) -> { })) {
            CompletableFuture<Outcome> future = muster.sessionAsync();
            return future.get();
        }
    }

    public AutoCloseable watch() {
        return muster.listenToJournal((List<Entry> journal) -> entries = journal.size());
    }

    public float[] read(float[] picture) {
        try (Model model = muster.model("digits")) {
            return model.predict(Collections.singletonMap("x", picture)).floats("output");
        } catch (NoModel error) {
            return new float[0];
        }
    }
}
