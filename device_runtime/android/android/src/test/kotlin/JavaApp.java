package dev.muster.device.android;

import android.content.Context;
import dev.muster.device.DType;
import dev.muster.device.DeviceException;
import dev.muster.device.NoModel;
import dev.muster.device.kept.Outcome;
import dev.muster.device.models.Model;
import dev.muster.device.permission.Policy;
import dev.muster.device.sessions.Progress;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;

/** The library as an app in Java uses it. */
final class JavaApp {
    final Muster muster;
    volatile String said = "";
    volatile int entries = -1;

    JavaApp(Context context) {
        muster =
            Muster.builder(context)
                .coordinator("http://127.0.0.1:9", "phones")
                .policy(Policy.of("{\"per_day\": {\"sessions\": 4}, \"min_cohort\": 2}"))
                .requirements(new Requirements(false, false, false))
                .attester(new KeyAttestation())
                .every(60)
                .warn(words -> said = words)
                .allowMainThread()
                .build();
    }

    int keep(float[] picture, int digit) {
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

    Outcome train() throws Exception {
        try (AutoCloseable outcomes = muster.listen(outcome -> said = outcome.getReason());
            AutoCloseable progress = muster.listenToProgress((Progress now) -> { })) {
            CompletableFuture<Outcome> future = muster.sessionAsync();
            return future.get();
        }
    }

    AutoCloseable watch() {
        return muster.listenToJournal((List<Map<String, Object>> journal) -> entries = journal.size());
    }

    float[] read(float[] picture) {
        try (Model model = muster.model("digits")) {
            return model.predict(Collections.singletonMap("x", picture)).floats("output");
        } catch (NoModel error) {
            return new float[0];
        }
    }
}
