// Playback of audio.

import { createElement, decodeBase64 } from "./dom.js";

export class AudioPlayer {
  /** `events`: timeChanged(seconds), repeatedly while it plays; changed(), when it starts or stops; failed(text). */
  constructor(events) {
    this.events = events;
    this.ready = false;
    this.audio = createElement("audio", {
      preload: "auto",
      onplay: () => this.handleStart(),
      onpause: () => this.handleStop(),
      onended: () => this.handleStop(),
      onseeked: () => events.timeChanged(this.time),
      onerror: () => this.ready && this.fail("This browser cannot play the audio."),
    });
  }

  /** `wav`: a WAV file in base64, or null. */
  load(wav) {
    if (this.wav === wav) return;
    this.stop();
    this.wav = wav;
    this.ready = wav !== null;
    URL.revokeObjectURL(this.url);
    if (!wav) return;
    this.url = URL.createObjectURL(new Blob([decodeBase64(wav)], { type: "audio/wav" }));
    this.audio.src = this.url;
  }

  get playing() {
    return !this.audio.paused && !this.audio.ended;
  }

  get time() {
    return this.audio.currentTime;
  }

  toggle() {
    if (this.playing) this.stop();
    else this.play();
  }

  seek(seconds) {
    if (this.ready) this.audio.currentTime = seconds;
  }

  playFrom(seconds) {
    this.seek(seconds);
    this.play();
  }

  play() {
    if (this.ready)
      this.audio.play().catch((error) => {
        // Stopping before the start is not an error. A page that may not play by itself needs a click.
        if (error.name === "NotAllowedError") this.fail("Click once to allow playback.");
        else if (error.name !== "AbortError") this.fail("This browser cannot play the audio.");
      });
  }

  stop() {
    this.audio.pause();
  }

  handleStart() {
    this.events.changed();
    const move = () => {
      if (!this.playing) return;
      this.events.timeChanged(this.time);
      this.frame = requestAnimationFrame(move);
    };
    cancelAnimationFrame(this.frame);
    move();
  }

  handleStop() {
    cancelAnimationFrame(this.frame);
    this.events.timeChanged(this.time);
    this.events.changed();
  }

  fail(text) {
    this.events.failed(text);
  }

  close() {
    this.stop();
    cancelAnimationFrame(this.frame);
    this.ready = false;
    this.audio.removeAttribute("src");
    URL.revokeObjectURL(this.url);
  }
}
